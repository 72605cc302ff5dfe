/* What a memory mode does: the interface of the backends.
 *
 * A backend never checks a quota and never blocks for a lease.
 */
#ifndef NVS_BACKEND_H
#define NVS_BACKEND_H

#include "base/base.h"
#include "memory/records/allocation.h"

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

#endif
