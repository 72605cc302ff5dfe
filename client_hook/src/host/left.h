/* How much host memory may still be taken. */
#ifndef NVS_LEFT_H
#define NVS_LEFT_H

#include <stdint.h>

/* Bytes that may be allocated so that a tenth of the machine (and of the container) stays free; UINT64_MAX: not known. */
uint64_t nvs_host_system_left(void);
uint64_t nvs_host_left_in(const char *root); /* the same, by the files under this directory */

/* The number behind a word in a small file; without a word, the file's first number.  UINT64_MAX: there is none. */
uint64_t nvs_host_number_in(const char *root, const char *name, const char *word);

#endif
