/* What the agent asks of the memory: its figures, and to move it. */
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
/* The virtual card: in, the real figures; out, what cuMemGetInfo must say. */
void nvs_memory_virtual_info(uint32_t gpu, uint64_t *free_bytes, uint64_t *total_bytes);
nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);
nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes);

/* Agent thread, instead of nvs_gate_open: opens the gate, unless so much is missing on the GPU that must be restored first. */
bool nvs_memory_open_gate(uint32_t gpu, bool paced, uint64_t *missing_bytes);
/* So much will probably be evicted at a time: host memory for it is made ready in the background, or given back. */
void nvs_memory_prepare_host(uint32_t gpu, uint64_t bytes);

#endif
