/* Host memory of the machine: mapped near a GPU, with all pages present, and how much is left.  Non-goal: registration with the driver. */
#ifndef NVS_HOST_SYSTEM_H
#define NVS_HOST_SYSTEM_H

#include "base/base.h"

#include <stdint.h>

#define NVS_HOST_GRAIN (UINT64_C(2) << 20)

typedef struct nvs_host_mapping {
    char *memory; /* aligned */
    char *raw;
    size_t raw_bytes;
} nvs_host_mapping;

/* Maps memory in huge pages and touches it, by several threads or (`gently`) by this one.  A forked child does not inherit it. */
bool nvs_host_map(uint32_t gpu, size_t bytes, size_t alignment, bool gently, nvs_host_mapping *out);
void nvs_host_unmap(const nvs_host_mapping *mapping);

/* Bytes that may be allocated so that a tenth of the machine (and of the container) stays free; UINT64_MAX: not known. */
uint64_t nvs_host_system_left(void);
uint64_t nvs_host_left_in(const char *root); /* the same, by the files under this directory */

#endif
