/* The contexts and streams of the application, and each thread's cache of the GPUs of handles (contexts/gpu.h).
 *
 * The wrappers of the context functions report here.  For a context that no wrapper has seen the registry queries the driver, with functions that a
 * stream capture allows.
 */
#ifndef NVS_CONTEXT_H
#define NVS_CONTEXT_H

#include "base/base.h"
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

/* --- contexts --- */

/* True if alive; false for NULL. */
bool nvs_context_lives(CUcontext context);

/* Pushes a context if it lives, for calls of the hook.  Not cuCtxPushCurrent alone: a driver accepts a destroyed context there, and crashes when the
 * context is popped. */
bool nvs_context_enter(CUcontext context);

/* The context that owns memory allocated now: the current one, or for a green context, which ends without its memory, the primary one.  NULL: none. */
CUcontext nvs_owner_context(void);

/* The same, mostly without a call of the driver: assumes that the only known context is current. */
CUcontext nvs_usual_owner(void);

/* Calls visit for each live context of a GPU (primary contexts included) until it returns false.  The registry is
 * not locked during a visit; a context that dies meanwhile yields CUDA errors.  False: a context was skipped because a thread is about to end it; its
 * work may run. */
bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument);

/* A live context of a GPU; NULL: the process has none there. */
CUcontext nvs_any_context(uint32_t gpu);

/* Begins a visit of one context, which then does not end before nvs_context_unhold.  0: the context is about to end, or not known. */
size_t nvs_context_hold(CUcontext context);
void nvs_context_unhold(size_t visit);

/* True: a thread is about to end the context and waits for its visits, so a long visit ends early. */
bool nvs_context_ends(CUcontext context);

/* Reports of the hooks (hooks/context.c). */
void nvs_context_learn(void);                              /* the driver is initialised */
bool nvs_context_possible(uint32_t gpu);                   /* the driver is initialised in this process, and has that GPU */
void nvs_context_created(CUcontext context, uint32_t gpu); /* idempotent; waits for a thread that still removes records of an ended context
                                                              with this handle */
void nvs_context_is_green(CUcontext context, CUcontext primary); /* of a reported context */
CUcontext nvs_green_owner(CUcontext context);              /* the primary context; NULL: not known */
uint32_t nvs_context_registered_gpu(CUcontext context);    /* NVS_NO_GPU: not registered */
uint32_t nvs_primary_gpu(CUcontext context);               /* the GPU whose primary context it is, or was before a reset: the next use reopens it */
bool nvs_context_leaving(CUcontext context, const nvs_slot *by); /* the thread of this slot is about to destroy it: no new visits; false: not
                                                               known */
void nvs_context_await_visitors(CUcontext context);         /* returns when all visits of a leaving context have ended */
void nvs_context_left(CUcontext context, bool ended);      /* ended: nothing else is recorded for its handle; else a leaving context lives on */

/* A thread retains, releases or resets a GPU's primary context between these two, and reports that in the next two.  Cancellation is deferred. */
int nvs_primary_begin(uint32_t gpu);
void nvs_primary_end(uint32_t gpu, int cancel);
void nvs_primary_retained(uint32_t gpu, CUcontext context);
CUcontext nvs_primary_released(uint32_t gpu, bool *last);  /* NULL: not known; last: no known reference is left */

void nvs_contexts_after_fork(void);                        /* in the child: empties the registry */

/* --- streams that the application has created --- */

/* Calls visit for each live stream of a context until it returns false.  A stream that the application destroys
 * during its visit is destroyed after the visit. */
void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument);

/* Reports of the hooks (hooks/context.c). */
void nvs_stream_created(CUstream stream, CUcontext context);
bool nvs_stream_leaving(CUstream stream, CUcontext *context); /* false: a visitor destroys it later; NULL: not known */
CUcontext nvs_stream_context(CUstream stream);             /* NULL: not reported */
void nvs_streams_context_gone(CUcontext context);          /* the driver has destroyed the context, and its streams too */

/* --- contexts with a sticky error --- */

/* The sticky error of the current context; CUDA_SUCCESS: none.  Any thread; during captures only in relaxed mode. */
CUresult nvs_context_error(void);
/* True: all contexts of the GPU have a sticky error.  The gate then lets all calls through (nvs_gate_dead). */
bool nvs_gpu_check_dead(uint32_t gpu);
/* The same of contexts that do not say so, when the driver fails all that the hook tries. */
void nvs_gpu_set_dead(uint32_t gpu, CUresult error);
/* True: a sticky error, or one that a driver without its GPU gives. */
bool nvs_is_lasting(CUresult result);

#endif
