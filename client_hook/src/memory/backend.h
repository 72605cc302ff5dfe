/* What a memory mode does: the interface of the backends.
 *
 * A backend never checks a quota and never blocks for a lease.
 */
#ifndef NVS_BACKEND_H
#define NVS_BACKEND_H

#include "base/base.h"
#include "memory/registry.h"

/* Callbacks of a pass to its goal (coord/mover.h), on threads of the mover. */
typedef struct nvs_watch {
    void (*moved)(void *argument, uint64_t moved_bytes); /* progress: bytes in all */
    /* How far the goal is after so many bytes in all; 0: the pass ends.  Coming in, it may wait for a moment until it is `least_bytes`. */
    uint64_t (*left)(void *argument, uint64_t moved_bytes, uint64_t least_bytes);
    void *argument;
    bool promised; /* the coordinator has promised room: a lack of it ends soon */
    bool asks;     /* no room is promised: a restoration requests it first, as an allocation does */
} nvs_watch;

typedef struct nvs_chunk_figures {
    uint64_t committed_bytes; /* of all chunks */
    uint64_t resident_bytes;  /* of these, on the GPU */
    uint64_t pinned_bytes; /* of the resident ones */
} nvs_chunk_figures;

typedef struct nvs_backend {
    nvs_memory_kind kind; /* of what it allocates */
    bool movable;
    /* It moves physical memory below fixed addresses, has figures of its own, does not wait for work in `release`, and its memory outlives a
     * context. */
    bool chunked;
    /* The caller has set the current context.  `kept` is the backend's data of an allocation. */
    CUresult (*allocate)(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept);
    CUresult (*release)(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept);
    /* The GPU's mover thread, gate closed and drained.  Moves out until the goal is reached or passed, or in as long as it is not passed.  Adds to
     * `moved_bytes` of this pass. */
    nvs_status (*move)(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes);
    void (*context_gone)(CUcontext context); /* forgets what it keeps for the context; not of mode `device` */
    /* The following only if `chunked`. */
    bool (*works)(uint32_t gpu); /* on this GPU */
    /* See nvs_memory_open_gates. */
    bool (*open_gates)(uint32_t gpu, uint32_t gpus, uint32_t paced, uint64_t *missing_bytes);
    void (*figures)(uint32_t gpu, nvs_chunk_figures *out);
    /* Memory for a handle of the application (cuMemCreate), freed by `release`.  CUDA_ERROR_NOT_SUPPORTED: the driver must make it. */
    CUresult (*create)(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, void **kept);
} nvs_backend;
extern const nvs_backend nvs_backend_device, nvs_backend_managed;
extern const nvs_backend *const nvs_memory_chunked __attribute__((visibility("hidden"))); /* of mode `swap`; init.c */

/* Whether the hook charges memory of this GPU; false if there is no such GPU.  The first call attaches to the coordinator. */
bool nvs_memory_manages(uint32_t gpu);
const nvs_backend *nvs_memory_backend(uint32_t gpu);

/* After the real cuInit and before any allocation: chooses the mode of a process that was started with `auto`.  Idempotent. */
void nvs_memory_choose_mode(void);
bool nvs_memory_mode_chosen(void); /* on any thread; then nvs_config.memory_mode is the mode in force */

#endif
