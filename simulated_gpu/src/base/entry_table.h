/* The table of entry points.  unsupported.c includes this without cuda.h. */
#ifndef SIM_ENTRY_TABLE_H
#define SIM_ENTRY_TABLE_H

#include <stdint.h>

typedef struct sim_entry {
    const char *symbol;
    int since;
    int (*address)(void);
} sim_entry;

extern const sim_entry nvs_sim_entries[];
extern const uint32_t nvs_sim_entry_count;

int nvs_sim_unsupported(const char *function); /* NOT_SUPPORTED, or the result of a fault rule */

#endif
