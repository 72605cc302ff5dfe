/* Memory modes behind one small interface, and the quota in front of them.
 *
 * hooks/memory/memory.c, hooks/memory/pool.c and hooks/memory/vmm.c (wrappers) call nvs_memory_*; those check the quota, call the backend and keep
 * the registry (memory/records/allocation.h).  The agent calls evict and restore.  A backend never checks a quota and never blocks for a lease.
 *
 * Charging: before the driver call, undone when it fails; what is charged is what was asked for, rounded up to the 512 bytes that the
 * driver hands out.  The driver's own overhead (contexts, code, what pools keep) is not charged.
 */
#ifndef NVS_MEMORY_H
#define NVS_MEMORY_H

#include "base/base.h"
#include "base/port.h"
#include "memory/records/allocation.h"
#include "memory/records/ledger.h"
#include "memory/records/pool_book.h"

typedef struct nvs_usage {
    uint64_t allocated_bytes; /* resident + evicted, charged to the quota */
    uint64_t resident_bytes;
    uint64_t pinned_bytes; /* resident and cannot move */
    uint64_t host_bytes;   /* host memory that holds evicted data */
} nvs_usage;

/* Who gave an order to move memory, asked and told while it is carried out, on threads of the mover. */
typedef struct nvs_watch {
    void (*moved)(void *argument, uint64_t moved_bytes); /* now and then, how much in all: what left is off the GPU for good */
    /* Whether so many bytes in all may have moved; with `wait` only when they may, or the order is to end with what has moved. */
    bool (*room)(void *argument, uint64_t bytes, bool wait);
    void *argument;
    bool promised; /* there is said to be room: if there is none, it will come in a moment */
    bool asks;     /* nobody has promised any: what comes in asks for room first, as an allocation does */
} nvs_watch;

typedef struct nvs_chunk_figures {
    uint64_t committed_bytes; /* of all chunks */
    uint64_t resident_bytes;  /* of these, on the GPU */
    uint64_t pinned_bytes; /* of the resident ones */
} nvs_chunk_figures;

typedef struct nvs_backend {
    const char *name;
    nvs_memory_kind kind; /* of what it allocates */
    bool movable;
    bool chunked; /* it moves physical memory below what is allocated: it has figures of its own, frees what work may still use, and
                     its memory outlives a context */
    /* Current context is set by the caller.  Real CUDA results.  `kept` is the backend's own word about an allocation. */
    CUresult (*allocate)(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept);
    CUresult (*release)(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept);
    /* The GPU's mover thread, gate closed and drained.  Move at least `bytes` (or all) out, or up to `bytes` in.  `watch` may be NULL. */
    nvs_status (*evict)(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);
    nvs_status (*restore)(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);
    void (*context_gone)(CUcontext context); /* forget what was cached for it */
    /* Chunked ones only. */
    bool (*works)(uint32_t gpu); /* on this GPU */
    /* Opens the gate if nothing is missing on the GPU. */
    bool (*open_gate)(uint32_t gpu, bool paced, uint64_t *missing_bytes);
    void (*figures)(uint32_t gpu, nvs_chunk_figures *out);
    /* What stands for a physical handle of the application's own (`kept`), given back by `release`.  CUDA_ERROR_NOT_SUPPORTED: this
     * one must be the driver's. */
    CUresult (*create)(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, void **kept);
} nvs_backend;
extern const nvs_backend nvs_backend_device, nvs_backend_managed;
extern const nvs_backend *const nvs_memory_chunked __attribute__((visibility("hidden"))); /* of mode `swap`; init.c */
bool nvs_backend_managed_works(uint32_t gpu); /* can this GPU's managed memory be moved by us? Asked once per GPU. */

void nvs_memory_usage(uint32_t gpu, nvs_usage *out);
/* What the coordinator set; 0 means none.  A limit below what is in use lets nothing more be allocated.
 * While the coordinator sets no limit, the one of the environment holds. */
void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, bool reserve);
/* No more of this client is brought to the GPU; the rest runs from the host (0: no bound).  Holds from the next move on. */
void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes);
/* More than this could never be on the GPU, beside what others have there that cannot move (0: not known). */
void nvs_memory_set_room(uint32_t gpu, uint64_t bytes);
/* The virtual card: in, the real figures; out, what cuMemGetInfo must say. */
void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes);
nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);
nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);
void nvs_memory_after_fork(void);

/* Agent thread, instead of nvs_gate_open: opens the gate, unless so much is missing on the GPU that must be restored first. */
bool nvs_memory_open_gate(uint32_t gpu, bool paced, uint64_t *missing_bytes);
/* So much will probably be evicted at a time: host memory for it is made ready in the background, or given back. */
void nvs_memory_prepare_host(uint32_t gpu, uint64_t bytes);

/* Called by the context hooks once the driver has destroyed or reset a context: what lived in it is gone. */
void nvs_memory_context_gone(CUcontext context);

/* --- for the wrappers --- */

/* `charged` did; the agent is told, if it does not know yet.  Where memory comes and goes all the time it does, and an exchange is dear.  Who
 * finds it so has changed `charged` before, and the agent takes its mark back before it reads that; all of it seq_cst. */
static inline void nvs_memory_changed(uint32_t gpu)
{
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_ledgers[gpu].to_report, memory_order_seq_cst) == 0))
        nvs_coordinator.memory_changed(gpu);
}

/* Is this GPU's memory ours to count?  Makes it known to the coordinator the first time. */
bool nvs_memory_manages(uint32_t gpu);
const nvs_backend *nvs_memory_backend(uint32_t gpu);

/* A registry entry with its bytes charged; CUDA_ERROR_OUT_OF_MEMORY over the limit.  Then exactly one of the next two. */
CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);
/* The same for what is remembered elsewhere: only the bytes, as they were charged. */
/* An allocation has found no memory: where it was the limit that refused it, that is said, once. */
void nvs_memory_say_limited(uint32_t gpu, uint64_t bytes);
CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes);
static inline void nvs_memory_uncharge(uint32_t gpu, uint64_t charged_bytes)
{
    nvs_ledger_uncharge(&nvs_ledgers[gpu], charged_bytes);
    nvs_memory_changed(gpu);
}
void nvs_memory_charge_again(uint32_t gpu, uint64_t charged_bytes);
void nvs_memory_in_chunks(nvs_allocation *admitted); /* the backend has figures of its own for it */
void nvs_memory_correct(nvs_allocation *admitted, uint64_t bytes); /* the driver took another amount than was thought */
void nvs_memory_keep(nvs_allocation *admitted, uint64_t key, uint64_t length); /* the driver said yes */
void nvs_memory_drop(nvs_allocation *taken);                                   /* uncharges and frees the entry */
void nvs_memory_drop_all(nvs_allocation *list);                                /* linked by `next` */
/* For backends: so much of an extent is off the GPU now. */
void nvs_memory_set_evicted(uint32_t gpu, const nvs_extent *extent, uint64_t evicted_bytes);

/* For backends: what all clients together may have resident (0: not known), and whether this one may have so much. */
uint64_t nvs_memory_capacity(uint32_t gpu);
uint64_t nvs_memory_ceiling(uint32_t gpu); /* of what this client may have in all; 0: none */
bool nvs_memory_may_grow(uint32_t gpu, uint64_t resident_bytes);

/* --- how it begins: allocate.c --- */

/* cuMemCreate through the backend: an entry whose key is a number of ours.  CUDA_ERROR_NOT_SUPPORTED: this handle must be the
 * driver's. */
CUresult nvs_memory_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, CUmemGenericAllocationHandle *out);
bool nvs_memory_is_number(uint64_t handle); /* one that nvs_memory_create gave out once */

/* cuMemAlloc through the backend. */
CUresult nvs_memory_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes);

/* The same in stream order: memory whose free is deferred behind the same stream (0: not known which) serves again at once. */
CUresult nvs_memory_allocate_in_order(uint32_t gpu, CUdeviceptr *out, size_t bytes, uint64_t stream);

/* cuPointerGetAttribute of memory in chunks.  hooks/memory/swap.c */
CUresult nvs_pointer_answer(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer);

/* Another GPU may now reach what a pool gave out, also what it gave before in chunks.  Waits for the lease, once.  hooks/memory/swap.c */
void nvs_swap_pool_opened(CUmemoryPool pool, uint32_t accessor, uint32_t gave); /* `gave`: GPUs, by bit, where any pool gave such */

/* Waits until nothing that was submitted in this context uses memory any more.  release.c */
CUresult nvs_memory_settle(uint32_t gpu, CUcontext context);

/* What a pool gave out, about to be freed: claimed in the book, and no longer charged.  All that is atomic comes before the driver's call:
 * after one it would wait for what the driver has written to the device, some hundred nanoseconds. */
static inline nvs_pool_place *nvs_memory_claim_pooled(uint64_t address, nvs_pool_memory *out)
{
    nvs_pool_place *claimed = nvs_pool_book_claim(address, out);
    if (claimed != NULL)
        nvs_memory_uncharge(out->gpu, out->charged_bytes);
    return claimed;
}

/* The driver was asked to free it; says what it said. */
static inline CUresult nvs_memory_pooled_freed(nvs_pool_place *claimed, const nvs_pool_memory *memory, CUresult result)
{
    if (NVS_LIKELY(result == CUDA_SUCCESS)) {
        nvs_pool_book_strike(claimed);
        return result;
    }
    nvs_memory_charge_again(memory->gpu, memory->charged_bytes);
    nvs_pool_book_restore(claimed, memory->address);
    return result;
}

/* cuMemFree: by the backend for what it made, by the driver for everything else. */
CUresult nvs_memory_release(CUdeviceptr pointer);

/* Frees what deferred frees have become free by now; with `wait`, waits (boundedly) until at least one has.
 * Returns whether anything was freed. */
bool nvs_memory_reap(uint32_t gpu, bool wait);

#endif
