/* Each thread's cache of the GPUs of handles. */
#ifndef NVS_GPU_CACHE_H
#define NVS_GPU_CACHE_H

#include "base/hot.h"

#include <stdatomic.h>

/* Incremented when a cached answer may be wrong. */
extern _Atomic uint32_t nvs_gpu_generation __attribute__((visibility("hidden")));

enum { NVS_GPU_PLACE_BITS = 3 };

typedef struct nvs_gpu_of {
    const void *handle; /* a stream's or a context's */
    uint32_t generation, gpu;
} nvs_gpu_of;

typedef struct nvs_gpu_cache { /* of one thread */
    uint32_t current_generation, current_gpu;
    uint32_t uses; /* left before the next query of the driver: a context may have become current without a wrapper */
    nvs_gpu_of of[1 << NVS_GPU_PLACE_BITS];
} nvs_gpu_cache;
extern _Thread_local nvs_gpu_cache nvs_cached_gpu __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* The cache entry of a handle. */
static inline nvs_gpu_of *nvs_gpu_place(const void *handle)
{
    return &nvs_cached_gpu.of[(uintptr_t)handle * UINT64_C(0x9e3779b97f4a7c15) >> (64 - NVS_GPU_PLACE_BITS)]; /* Fibonacci hashing */
}

void nvs_gpus_outdated(void);                              /* invalidates all caches */

#endif
