/* Memory modes behind one small interface, and the quota in front of them.
 *
 * hook_memory.c (wrappers) calls nvs_memory_*; those check the quota, call the backend and keep the registry
 * (allocation.h).  The agent calls evict and restore.  A backend never checks a quota and never blocks for a lease.
 */
#ifndef NVS_MEMORY_H
#define NVS_MEMORY_H

#include "base.h"

typedef struct nvs_usage {
    uint64_t allocated_bytes; /* resident + evicted, charged to the quota */
    uint64_t resident_bytes;
    uint64_t pinned_bytes; /* resident and cannot move */
    uint64_t host_bytes;   /* host memory that holds evicted data */
} nvs_usage;

/* Called now and then while bytes move. */
typedef void nvs_progress(void *argument, uint64_t moved_bytes);

typedef struct nvs_backend {
    const char *name;
    /* Current context is set by the caller.  Real CUDA results. */
    CUresult (*allocate)(uint32_t gpu, CUdeviceptr *out, size_t bytes);
    CUresult (*release)(uint32_t gpu, CUdeviceptr pointer, size_t bytes);
    /* Agent thread, gate closed and drained.  Move at least `bytes` (or all) out, or up to `bytes` in. */
    nvs_status (*evict)(uint32_t gpu, uint64_t bytes, nvs_progress *progress, void *argument, uint64_t *moved_bytes);
    nvs_status (*restore)(uint32_t gpu, uint64_t bytes, nvs_progress *progress, void *argument, uint64_t *moved_bytes);
} nvs_backend;
extern const nvs_backend nvs_backend_device, nvs_backend_managed;

void nvs_memory_usage(uint32_t gpu, nvs_usage *out);
/* What the coordinator set; 0 means none.  A limit below what is in use lets nothing more be allocated. */
void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, bool reserve);
void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes);
/* The virtual card: what cuMemGetInfo must say, from the real figures. */
void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes);
nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, nvs_progress *, void *argument, uint64_t *moved_bytes);
nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, nvs_progress *, void *argument, uint64_t *moved_bytes);
void nvs_memory_after_fork(void);

#endif
