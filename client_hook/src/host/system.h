/* What pool.c asks of the operating system: how much memory is left, and memory that is near a GPU and really there.
 *
 * May not go here: state; registration with the driver.
 */
#ifndef NVS_HOST_SYSTEM_H
#define NVS_HOST_SYSTEM_H

#include "base/base.h"

/* What may still be taken so that a tenth of the machine (and of the container) stays free; UINT64_MAX: not known. */
uint64_t nvs_host_system_left(void);
uint64_t nvs_host_left_in(const char *root); /* the same, by the files under this directory */

/* A number behind a word in a small file, or the file's only number when there is no word; UINT64_MAX when it is not there. */
uint64_t nvs_host_number_in(const char *root, const char *name, const char *word);

typedef struct nvs_host_mapping {
    char *memory; /* aligned */
    char *raw;
    size_t raw_bytes;
} nvs_host_mapping;

/* Memory in huge pages, touched: by several threads, or `gently` by this one alone.  A forked child has none of it. */
bool nvs_host_map(uint32_t gpu, size_t bytes, size_t alignment, bool gently, nvs_host_mapping *out);
void nvs_host_unmap(const nvs_host_mapping *mapping);

#endif
