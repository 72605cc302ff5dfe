/* The words that every gated call reads, and the first threads' slots, on one page.  With one GPU, a kernel launch or a stream-ordered
 * allocation reads one cache line of it.
 *
 * Between two calls a program may evict the hook from the caches.  The cost of a call is then the number of cache lines and pages
 * that it touches (docs/decisions/cold-calls.md).
 *
 * Non-goals: state that not every call reads.
 */
#ifndef NVS_HOT_H
#define NVS_HOT_H

#include "base/base.h"

#include <stdatomic.h>

enum { NVS_FIRST_SLOTS = 16 }; /* most processes need no more */
enum { NVS_HOT_REALS = 4 };    /* cuLaunchKernel to cuLaunchKernel_ptsz */
#define NVS_CAPTURE_HOST 0x40000000u /* host functions have been submitted: work in per-thread streams has marks (gate/host_functions.h) */
#define NVS_CAPTURE_FIRST 0x80000000u /* the marks of the first capture are being made (inflight/captures.c) */
enum { NVS_POOLS_UNKNOWN, NVS_POOLS_FAST, NVS_POOLS_SLOW }; /* the path of stream-ordered allocations (hooks/pool.c); SLOW is final */
enum { NVS_ACTIVE_GPU = 0xff, NVS_ACTIVE_NOWAIT = 0x100, NVS_ACTIVE_HOST = 0x200 }; /* of nvs_slot.active */
enum { NVS_ASKING = UINT32_MAX }; /* of nvs_slot.awaiting: the thread is in a query of an event, a stream or the card */
enum { NVS_STOP_NEVER, NVS_STOP_ALLOWED, NVS_STOP_AT_EXIT, NVS_STOPPED };

/* Never freed while its thread lives; kept on a list that only grows, and reused by later threads. */
typedef struct nvs_slot {
    _Alignas(64) _Atomic uint32_t active;    /* 0, or 1 + the GPU of the gated call that the thread is in; NVS_ACTIVE_NOWAIT: it has passed without
                                                a lease; NVS_ACTIVE_HOST alone: the thread is in a host function, and passes all gates */
    struct {                                 /* submissions: gate/gate.h and gate.c; owner thread only */
        uint32_t countdown;                  /* until pacing looks, if it does not look at each */
        uint32_t stride;                     /* the start value of the countdown */
        uint32_t unseen;                     /* earlier ones that pacing has not seen */
    } pace;
    _Atomic uint32_t awaiting;               /* 0, or 1 + the GPU whose work the thread waits for in a call, or NVS_ASKING */
    uint32_t waits;                          /* 0, or 1 + the GPU at whose gate the thread counts as waiting */
    uint32_t graph_left;                     /* launches of `graph` until pacing looks again */
    uint32_t owner_uses;                     /* uses of nvs_hot.only_context until the driver is asked for the current context */
    const void *graph;                       /* the last graph launched; owner thread only, as graph_left */
    _Atomic uint64_t calls[NVS_MAX_GPUS];    /* gated calls let through; written by its thread, summed by the agent */
    _Atomic uint32_t owned;
    uint32_t stop;                           /* NVS_STOP_...: whether the present wait may end without the lease; owner thread only */
    struct nvs_slot *next;
} nvs_slot;

typedef struct nvs_hot_page {
    _Alignas(4096) _Atomic(nvs_function) reals[NVS_HOT_REALS]; /* as nvs_reals of driver/cuda_api.h */
    /* Offset of nvs_self (gate/gate.h) from the thread pointer, the same for all threads; 0: not exactly one GPU, or not known yet.
     * Relaxed: as only_gpu. */
    _Atomic intptr_t self;
    /* The only live context that the hooks have seen; NULL: none, or several.  Relaxed: a thread gets another context's handle from the
     * call that wrote here, or from a thread that has it. */
    _Atomic(CUcontext) only_context;
    _Atomic uint32_t only_gpu;                /* the GPU of every call when the process sees exactly one; NVS_NO_GPU until that is known */
    _Atomic uint32_t capturing;               /* captures that are open or about to be, and NVS_CAPTURE_FIRST: see inflight/captures.h */
    _Atomic uint32_t pools;                   /* NVS_POOLS_...  Relaxed: a thread gets a special pool from the call that ended
                                                 the fast path; both paths are correct for other pools */
    _Atomic uint32_t gates[NVS_MAX_GPUS];     /* NVS_GATE_OPEN ... of gate/gate.h; the first is the line's last word */
    _Atomic uint32_t parked;                  /* 0, or 1 + a GPU of the process: queries wait for a lease of that GPU (gate/gate.h) */
    _Atomic uint32_t imports;                 /* open imports (ipc/import.c).  Relaxed: a thread that has a pointer into one got it
                                                 after the import was counted */
    nvs_slot first_slots[NVS_FIRST_SLOTS];
} nvs_hot_page;
_Static_assert(offsetof(nvs_hot_page, gates) == 60, "one line has it all");

extern nvs_hot_page nvs_hot __attribute__((visibility("hidden")));

/* The GPU of every call where the process sees exactly one, else NVS_NO_GPU.  Relaxed: one word, written with one value only. */
static inline uint32_t nvs_only_gpu(void)
{
    return atomic_load_explicit(&nvs_hot.only_gpu, memory_order_relaxed);
}

static inline void nvs_pools_go(uint32_t from, uint32_t to)
{
    atomic_compare_exchange_strong_explicit(&nvs_hot.pools, &from, to, memory_order_relaxed, memory_order_relaxed); /* see its declaration */
}

#endif
