/* Requests of the layers below coord/ to the coordinator.  coord/ implements them; init.c fills the table. */
#ifndef NVS_PORT_H
#define NVS_PORT_H

#include "base/base.h"

typedef struct nvs_port {
    /* Blocks the calling thread until calls pass the gate of this GPU, or the wait is stopped. */
    void (*wait_for_lease)(uint32_t gpu);

    /* Attaches the GPU; returns when its settings have come, or after a bounded wait.  Before the first allocation or memory figure; idempotent, and quick
     * afterwards. */
    void (*attach)(uint32_t gpu);

    /* The usage has changed; a report follows soon, for several changes together. */
    void (*memory_changed)(uint32_t gpu);

    /* Makes the reservation on this GPU at least `total_bytes`; waits for the answer.  NVS_REFUSED: out of memory.
     * NVS_UNAVAILABLE: no coordinator answers, and only the local limit applies. */
    nvs_status (*reserve)(uint32_t gpu, uint64_t total_bytes);

    /* The same for pinned memory, `total_bytes` in all.  NVS_UNAVAILABLE, too, if the coordinator takes no such requests. */
    nvs_status (*reserve_pins)(uint32_t gpu, uint64_t total_bytes);

    /* Requests `total_bytes` as this program's share of the node's host memory, and waits, with a limit, until host/pool.h has the answer; returns at once
     * without a connection. */
    void (*reserve_host)(uint64_t total_bytes);
} nvs_port;

extern const nvs_port nvs_coordinator __attribute__((visibility("hidden")));

#endif
