/* The figures of memory, and its moves, for the agent. */
#ifndef NVS_MOVING_H
#define NVS_MOVING_H

#include "memory/backends/backend.h"

typedef struct nvs_usage {
    uint64_t allocated_bytes; /* resident + evicted, charged to the quota */
    uint64_t resident_bytes;
    uint64_t pinned_bytes; /* resident and cannot move */
    uint64_t host_bytes;   /* host memory that holds evicted data */
} nvs_usage;

void nvs_memory_usage(uint32_t gpu, nvs_usage *out);
/* The virtual card: in, the real figures; out, those for cuMemGetInfo. */
void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes);
nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);
nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);

/* Agent thread: opens the gate; false: so many bytes must be restored before. */
bool nvs_memory_open_gate(uint32_t gpu, bool paced, uint64_t *missing_bytes);
/* Prepares host memory for evictions of this size in the background, or gives it back. */
void nvs_memory_prepare_host(uint32_t gpu, uint64_t bytes);

#endif
