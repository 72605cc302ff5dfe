/* A weak body for every entry point of a driver: CUDA_ERROR_NOT_SUPPORTED.  An implementation in another file replaces it at link time.
 *
 * The entry points are the rows of the hook's table.  This file must not include cuda.h: the bodies have no parameters, which the C
 * calling conventions of Linux allow.
 */
#include "base/entry_table.h"

#define CUDA_VERSION 99999 /* all rows */
#define ENTRY(symbol, since)                                                                    \
    __attribute__((weak, visibility("default"))) int symbol(void);                              \
    int symbol(void) { return nvs_sim_unsupported(#symbol); }
#include "base/rows.h"
#undef ENTRY

const sim_entry nvs_sim_entries[] = {
#define ENTRY(symbol, since) {#symbol, since, symbol},
#include "base/rows.h"
#undef ENTRY
};
const uint32_t nvs_sim_entry_count = sizeof nvs_sim_entries / sizeof *nvs_sim_entries;
