/* Properties of a GPU. */
#ifndef NVS_GPU_FACTS_H
#define NVS_GPU_FACTS_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct nvs_gpu_facts {
    char uuid[96];        /* "GPU-..." or "MIG-...", as NVML writes it */
    uint64_t total_bytes; /* of the real card */
} nvs_gpu_facts;
nvs_status nvs_gpu_describe(uint32_t gpu, nvs_gpu_facts *out); /* UNAVAILABLE: the driver is not usable in this process */

/* A boolean device attribute, cached in `known` once the driver has answered; before that false. */
bool nvs_gpu_supports(uint32_t gpu, CUdevice_attribute attribute, _Atomic uint8_t known[NVS_MAX_GPUS]);

#endif
