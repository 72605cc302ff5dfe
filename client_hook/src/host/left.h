/* How much host memory may still be taken. */
#ifndef NVS_LEFT_H
#define NVS_LEFT_H

#include <stdint.h>

/* What may still be taken so that a tenth of the machine (and of the container) stays free; UINT64_MAX: not known. */
uint64_t nvs_host_system_left(void);
uint64_t nvs_host_left_in(const char *root); /* the same, by the files under this directory */

/* A number behind a word in a small file, or the file's only number when there is no word; UINT64_MAX when it is not there. */
uint64_t nvs_host_number_in(const char *root, const char *name, const char *word);

#endif
