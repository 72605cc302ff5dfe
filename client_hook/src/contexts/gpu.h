/* The GPU of a call: from the cache, else from the driver; and its properties. */
#ifndef NVS_GPU_H
#define NVS_GPU_H

#include "base/base.h"
#include "contexts/context.h"

#include <stdatomic.h>

uint32_t nvs_ask_current_gpu(void);
uint32_t nvs_ask_stream_gpu(CUstream stream);

/* GPU ordinal (CUdevice) of the calling thread's current context; NVS_NO_GPU: none is current.  With one visible GPU
 * it is that GPU, context or not.  A few ns. */
static inline uint32_t nvs_current_gpu(void)
{
    const uint32_t only = nvs_only_gpu();
    nvs_gpu_cache *cached = &nvs_cached_gpu;
    if (NVS_LIKELY(only != NVS_NO_GPU))
        return only;
    /* Acquire pairs with the release in context.c: a later answer of the driver is newer than the change. */
    if (NVS_UNLIKELY(cached->current_generation != atomic_load_explicit(&nvs_gpu_generation, memory_order_acquire)) ||
        NVS_UNLIKELY(cached->uses == 0))
        return nvs_ask_current_gpu();
    cached->uses--;
    return cached->current_gpu;
}

/* GPU of a stream; for the default streams, of the current context.  Cached per thread. */
static inline uint32_t nvs_stream_gpu(CUstream stream)
{
    const uint32_t only = nvs_only_gpu();
    if (NVS_LIKELY(only != NVS_NO_GPU))
        return only;
    if ((uintptr_t)stream <= (uintptr_t)CU_STREAM_PER_THREAD)
        return nvs_current_gpu(); /* NULL, CU_STREAM_LEGACY, CU_STREAM_PER_THREAD */
    const nvs_gpu_of *known = nvs_gpu_place(stream);
    if (NVS_UNLIKELY(known->handle != stream) || /* acquire: as above */
        NVS_UNLIKELY(known->generation != atomic_load_explicit(&nvs_gpu_generation, memory_order_acquire)))
        return nvs_ask_stream_gpu(stream);
    return known->gpu;
}

/* True: the stream is captured, or the legacy stream beside a capture that a query of it would invalidate. */
bool nvs_stream_captures(CUstream stream);

/* GPU of a context handle; NVS_NO_GPU: not known. */
uint32_t nvs_context_gpu(CUcontext context);

uint32_t nvs_live_context_gpu(CUcontext context);          /* the same for a context that surely lives: the driver has just returned it */
void nvs_current_changed(CUcontext context);                /* the thread's current context is now this one; NULL: unknown.  Not needed
                                                               with one GPU */

typedef struct nvs_gpu_facts {
    char uuid[96];        /* "GPU-..." or "MIG-...", as NVML writes it */
    uint64_t total_bytes; /* of the real card */
} nvs_gpu_facts;
nvs_status nvs_gpu_describe(uint32_t gpu, nvs_gpu_facts *out); /* UNAVAILABLE: the driver is not usable in this process */

/* The identity of the process's GPUs.  The coordinator may move the process to other ones of the same model; the program sees those that it began with. */
void nvs_gpus_remember(void);                         /* before it leaves them; the first call counts */
bool nvs_gpu_identity(uint32_t gpu, CUuuid *out);     /* what the program sees; false: the driver's own answer, as it was never moved */
bool nvs_gpu_identity_is(uint32_t gpu, const char *uuid); /* as NVML writes it */

/* A boolean device attribute, cached in `known` once the driver has answered; before that false. */
bool nvs_gpu_supports(uint32_t gpu, CUdevice_attribute attribute, _Atomic uint8_t known[NVS_MAX_GPUS]);

#endif
