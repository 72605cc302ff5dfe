/* Which GPU a call is for, and which contexts and streams a drain must look at.
 *
 * CUDA's own bookkeeping is followed, not replaced: the hooks of the context and stream functions report here, and what
 * they cannot have seen is asked of the driver.  Only queries that a stream capture allows are made.
 */
#ifndef NVS_CONTEXT_H
#define NVS_CONTEXT_H

#include "base/hot.h"

#include <stdatomic.h>

/* Grows when an answer that some thread has cached may have become wrong. */
extern _Atomic uint32_t nvs_gpu_generation __attribute__((visibility("hidden")));

enum { NVS_GPU_PLACE_BITS = 3 };

typedef struct nvs_gpu_of {
    const void *handle; /* a stream's or a context's */
    uint32_t generation, gpu;
} nvs_gpu_of;

typedef struct nvs_gpu_cache { /* what a thread found out last */
    uint32_t current_generation, current_gpu;
    uint32_t uses; /* before the driver is asked again: a context may have been made current by a path that nobody sees */
    nvs_gpu_of of[1 << NVS_GPU_PLACE_BITS];
} nvs_gpu_cache;
extern _Thread_local nvs_gpu_cache nvs_cached_gpu __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* Where a handle's GPU would stand. */
static inline nvs_gpu_of *nvs_gpu_place(const void *handle)
{
    return &nvs_cached_gpu.of[(uintptr_t)handle * UINT64_C(0x9e3779b97f4a7c15) >> (64 - NVS_GPU_PLACE_BITS)]; /* Fibonacci hashing */
}

uint32_t nvs_ask_current_gpu(void);
uint32_t nvs_ask_stream_gpu(CUstream stream);

/* GPU ordinal (CUdevice) of the calling thread's current context; NVS_NO_GPU when there is none.  With one GPU visible
 * it is that one, context or not.  A few ns. */
static inline uint32_t nvs_current_gpu(void)
{
    const uint32_t only = nvs_only_gpu();
    nvs_gpu_cache *cached = &nvs_cached_gpu;
    if (NVS_LIKELY(only != NVS_NO_GPU))
        return only;
    /* Acquire pairs with the release in which_gpu.c: what the driver says afterwards is newer than the change. */
    if (NVS_UNLIKELY(cached->current_generation != atomic_load_explicit(&nvs_gpu_generation, memory_order_acquire)) ||
        NVS_UNLIKELY(cached->uses == 0))
        return nvs_ask_current_gpu();
    cached->uses--;
    return cached->current_gpu;
}

/* GPU of a stream handle; of the current context for the default streams.  Cached per thread. */
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

/* GPU of a context handle; NVS_NO_GPU when it is not known. */
uint32_t nvs_context_gpu(CUcontext context);

/* Has it not been destroyed?  NULL has. */
bool nvs_context_lives(CUcontext context);

/* For calls of the hook's own: makes it current, to be popped, if it lives.  Never cuCtxPushCurrent itself: a driver takes one that has been destroyed,
 * and crashes when that is popped. */
bool nvs_context_enter(CUcontext context);

/* The context that what is allocated now belongs to: the current one, or the primary one of which that is a part (a green
 * context ends without its memory).  NULL: none. */
CUcontext nvs_owner_context(void);

/* The same, mostly without asking the driver: where the hooks have seen one context only it is taken for the current one. */
CUcontext nvs_usual_owner(void);

/* Calls visit for each live context of a GPU (primary contexts included) until it returns false.  The registry is
 * not locked during visit; a context that dies meanwhile yields CUDA errors, which the visitor must survive.  False: one was
 * left out, as a thread is about to end it; its work may run. */
bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument);

/* A visit of one context, which does not end meanwhile: nvs_context_unhold ends the visit.  0: the context is about to end, or not known. */
size_t nvs_context_hold(CUcontext context);
void nvs_context_unhold(size_t visit);

/* A thread is about to end the context and waits for its visits: a long one is cut short. */
bool nvs_context_ends(CUcontext context);

/* --- dead.c --- */

/* The sticky error of the current context; CUDA_SUCCESS: it has none.  Any thread, also beside captures in relaxed mode. */
CUresult nvs_context_error(void);
/* Looks whether all contexts of the GPU have a sticky error.  If so the gate lets all calls through from now on (nvs_gate_dead). */
bool nvs_gpu_look_dead(uint32_t gpu);

/* The same for the live streams that the application created in a context.  A stream that the application destroys
 * during its visit is really destroyed after it. */
void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument);

typedef struct nvs_gpu_facts {
    char uuid[96];        /* "GPU-..." or "MIG-...", as NVML writes it */
    uint64_t total_bytes; /* of the real card */
} nvs_gpu_facts;
nvs_status nvs_gpu_describe(uint32_t gpu, nvs_gpu_facts *out); /* UNAVAILABLE: the driver is not usable in this process */

/* Reports of the hooks (hooks/work/context.c). */
void nvs_context_learn(void);                              /* the driver is initialised */
bool nvs_context_possible(uint32_t gpu);                   /* it is, in this very process, and has that GPU */
void nvs_context_created(CUcontext context, uint32_t gpu); /* idempotent */
void nvs_context_is_green(CUcontext context, CUcontext primary); /* of one that was reported */
CUcontext nvs_green_owner(CUcontext context);              /* that primary one; NULL: that was not said, or it is gone */
uint32_t nvs_context_registered_gpu(CUcontext context);    /* NVS_NO_GPU: it is not known here */
uint32_t nvs_context_told(CUcontext context);              /* its GPU, when the driver has just said that it lives */
uint32_t nvs_primary_gpu(CUcontext context);               /* whose primary one it was last: after a reset it comes back with the next use */
bool nvs_context_leaving(CUcontext context, const nvs_slot *by); /* about to be destroyed, by the thread of this slot: no new visits; false when
                                                               it was not known */
void nvs_context_await_visitors(CUcontext context);         /* of one that leaves: all visits have ended */
void nvs_context_gone(CUcontext context);                  /* it is; its streams with it */
void nvs_primary_retained(uint32_t gpu, CUcontext context);
CUcontext nvs_primary_released(uint32_t gpu, bool *last);  /* NULL: none was seen; last: no reference that was seen is left */
void nvs_current_changed(CUcontext context);                /* of the calling thread, to this one, or NULL: to another one; need not be told where
                                                               there is one GPU */
void nvs_gpus_outdated(void);                              /* what was known of a handle may be wrong now */
void nvs_stream_created(CUstream stream, CUcontext context);
bool nvs_stream_leaving(CUstream stream, CUcontext *context); /* false: the visitor destroys it, do not; NULL: not known */
CUcontext nvs_stream_context(CUstream stream);             /* of a stream that was reported; else NULL */
void nvs_capture_on(uint32_t gpu, CUstream stream, bool per_thread, bool into_new); /* a capture has begun: for hooks/work/capture.c */

#endif
