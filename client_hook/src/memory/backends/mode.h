/* Which backend a GPU's memory is of. */
#ifndef NVS_MODE_H
#define NVS_MODE_H

#include "memory/backends/backend.h"

/* Is this GPU's memory ours to count?  Makes it known to the coordinator the first time. */
bool nvs_memory_manages(uint32_t gpu);
const nvs_backend *nvs_memory_backend(uint32_t gpu);

#endif
