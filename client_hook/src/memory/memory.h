/* Memory on a GPU: its allocation, charge, free, figures and moves.
 *
 * An allocation is admitted, made, and kept.  Admission charges it, by the quota, and frees for it what is not used any more: memory that was freed in
 * stream order, memory that graphs and pools of the driver keep.  The backend of the memory mode, or the driver, makes it; nvs_memory_keep enters it in
 * the registry.  nvs_memory_drop uncharges an entry that was taken out.
 *
 * Non-goals: wrappers, messages, how mode `swap` works.
 */
#ifndef NVS_MEMORY_H
#define NVS_MEMORY_H

#include "base/hot.h"
#include "memory/backend.h"
#include "memory/pools.h"
#include "memory/quota.h"
#include "memory/registry.h"

#include <stdatomic.h>

void nvs_memory_in_chunks(nvs_allocation *admitted); /* the backend has its own figures of it */
void nvs_memory_correct(nvs_allocation *admitted, uint64_t bytes); /* the driver's size differs from the estimate */
void nvs_memory_keep(nvs_allocation *admitted, uint64_t key, uint64_t length); /* the driver has made the memory */
void nvs_memory_drop(nvs_allocation *taken);                                   /* uncharges and frees the entry */
void nvs_memory_drop_all(nvs_allocation *list);                                /* linked by `node.next` */

/* A registry entry with its bytes charged; CUDA_ERROR_OUT_OF_MEMORY over the limit.  Exactly one of nvs_memory_keep and nvs_memory_drop follows. */
CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);
/* The same without an entry: only charges the bytes. */
CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes);

/* Ends the deferred frees whose streams have reached them; `wait`: waits for at least one, with a limit.  Returns whether memory was freed. */
bool nvs_memory_reap(uint32_t gpu, bool wait);

/* Pinned memory, which stays on the card without a lease: exported, accessed by another GPU, or the driver's.
 *
 * It leaves less for other programs, so the hook requests it from the coordinator (nvs_agent_reserve_pins).  A refusal makes the call out of memory;
 * otherwise a program that does not fit beside it would wait for ever.  A request includes the bytes of concurrent requests, so that together they get no
 * more than there is.
 */

/* Whether `bytes` more may be pinned.  If true, the caller calls nvs_pins_counted when they are counted, or will not be. */
bool nvs_pins_may(uint32_t gpu, uint64_t bytes);
void nvs_pins_counted(uint32_t gpu, uint64_t bytes);
/* Logs once that `what` was refused. */
void nvs_pins_log_refused(const char *what);

/* nvs_memory_admit for memory of the driver, which the hook cannot move. */
CUresult nvs_pins_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);

void nvs_memory_after_fork(void);

/* The quota of memory that graphs allocate.
 *
 * A node that allocates reserves an address (measured on a driver 580, docs/decisions/graph-memory.md).  The driver allocates when an executable is first
 * uploaded or launched, and keeps the memory after the executable is destroyed, until a trim.  An allocation that its graph does not free outlives both.
 * So each GPU is charged with the larger of two figures:
 *  - the memory that all executables need at once, from their instantiation on;
 *  - the memory that the driver holds for graphs.
 * The driver's figure has the frees.  Unneeded memory is trimmed before an allocation is refused, and at an eviction.
 *
 * Non-goals: on which GPUs a graph runs (hooks/graph.h).
 */

/* The process has made a node that allocates: from now on the nodes of each graph are read before its instantiation.  Relaxed: the thread that
 * instantiates a graph has its handle from the thread that made the node. */
extern _Atomic bool nvs_graphs_allocate __attribute__((visibility("hidden")));

static inline void nvs_graph_allocates(void)
{
    atomic_store_explicit(&nvs_graphs_allocate, true, memory_order_relaxed); /* see its declaration */
}

static inline bool nvs_any_graph_allocates(void)
{
    return NVS_UNLIKELY(atomic_load_explicit(&nvs_graphs_allocate, memory_order_relaxed)); /* see its declaration */
}

/* Updates the charge: the driver's figure may have changed. */
void nvs_graph_memory_learn(uint32_t gpu);

/* --- graphs.c: the memory that executable graphs allocate, charged before the instantiation, until the executable is destroyed --- */

/* Before an instantiation, outside of a gate: charges the executable's memory.  `held` is linked by `node.next`, for the next function. */
CUresult nvs_graph_memory_admit(CUgraph graph, nvs_allocation **held);
/* After it, and after the driver was to destroy an executable.  `made`: NULL if there is none. */
void nvs_graph_memory_keep(CUgraphExec made, nvs_allocation *held);
/* Before an executable is destroyed. */
nvs_allocation *nvs_graph_memory_take(CUgraphExec ready);

/* --- allocation --- */

/* cuMemCreate by the backend: the handle is a number of the hook.  CUDA_ERROR_NOT_SUPPORTED: the driver must make the handle. */
CUresult nvs_memory_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, CUmemGenericAllocationHandle *out);
bool nvs_memory_is_number(uint64_t handle); /* of nvs_memory_create, alive or released */

/* cuMemAlloc by the backend. */
CUresult nvs_memory_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes);

/* The same in stream order: reuses memory whose free is deferred on the same stream (0: not known). */
CUresult nvs_memory_allocate_in_order(uint32_t gpu, CUdeviceptr *out, size_t bytes, uint64_t stream);

/* --- free: at once, in stream order, or with its context --- */

/* Waits for all work that was submitted in this context. */
CUresult nvs_memory_wait_idle(uint32_t gpu, CUcontext context);

/* Before the free of a pool's memory: claims its place and uncharges it.  Atomics come before the call of the driver: after it they would wait some
 * hundred nanoseconds for the driver's writes to the device. */
static inline nvs_pool_place *nvs_memory_claim_pooled(uint64_t address, nvs_pool_memory *out)
{
    nvs_pool_place *claimed = nvs_pool_book_claim(address, out);
    if (claimed != NULL)
        nvs_memory_uncharge(out->gpu, out->charged_bytes);
    return claimed;
}

/* After that free: returns the driver's result. */
static inline CUresult nvs_memory_pooled_freed(nvs_pool_place *claimed, const nvs_pool_memory *memory, CUresult result)
{
    if (NVS_LIKELY(result == CUDA_SUCCESS)) {
        nvs_pool_book_remove(claimed);
        if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.pools, memory_order_relaxed) == NVS_POOLS_SLOW)) /* see its declaration */
            nvs_pools_freed(memory->gpu, memory->charged_bytes);
        return result;
    }
    nvs_memory_charge_again(memory->gpu, memory->charged_bytes);
    nvs_pool_book_restore(claimed, memory->address);
    return result;
}

/* cuMemFree: by the backend for its memory, else by the driver. */
CUresult nvs_memory_release(CUdeviceptr pointer);

/* After the driver has ended or reset a context, and the memory in it. */
void nvs_memory_context_gone(CUcontext context);

/* --- figures and moves, for the agent --- */

typedef struct nvs_usage {
    uint64_t allocated_bytes; /* resident + evicted, charged to the quota */
    uint64_t resident_bytes;
    uint64_t pinned_bytes; /* resident and cannot move */
    uint64_t host_bytes;   /* host memory that holds evicted data */
} nvs_usage;

void nvs_memory_usage(uint32_t gpu, nvs_usage *out);
uint64_t nvs_memory_resident(uint32_t gpu); /* of these figures */
/* The virtual card: in, the real figures; out, those for cuMemGetInfo. */
void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes);
/* The mover: one pass towards the goal of `watch`. */
nvs_status nvs_memory_move(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes);

/* Agent thread: opens the gates of these GPUs, a bit each, `paced` or not, if no memory is missing on them.  `missing_bytes`: on `gpu`, which may be
 * none of them. */
bool nvs_memory_open_gates(uint32_t gpu, uint32_t gpus, uint32_t paced, uint64_t *missing_bytes);

#endif
