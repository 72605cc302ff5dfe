/* The backend of a GPU's memory. */
#ifndef NVS_MODE_H
#define NVS_MODE_H

#include "memory/backends/backend.h"

/* Whether the hook charges memory of this GPU; false if there is no such GPU.  The first call attaches to the coordinator. */
bool nvs_memory_manages(uint32_t gpu);
const nvs_backend *nvs_memory_backend(uint32_t gpu);

#endif
