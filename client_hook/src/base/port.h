/* What the layers below coord/ ask of the coordinator.  coord/ answers; init.c fills the table in. */
#ifndef NVS_PORT_H
#define NVS_PORT_H

#include "base/base.h"

typedef struct nvs_port {
    /* Blocks the calling thread until the gate of this GPU is not closed any more.  False: the process is ending and the call must go
     * through whatever the gate says, so that exit() cannot hang. */
    bool (*wait_for_lease)(uint32_t gpu);

    /* Makes the GPU known to the coordinator and returns when its settings have come, or after a bounded wait without a coordinator.
     * Comes before the first allocation or memory figure; idempotent and quick afterwards. */
    void (*attach)(uint32_t gpu);

    /* Usage changed; the report is sent soon, many changes in one. */
    void (*memory_changed)(uint32_t gpu);

    /* Makes the reservation on this GPU at least `total_bytes`; waits for the answer.  NVS_REFUSED: out of memory.
     * NVS_UNAVAILABLE: there is nobody to ask; then the local limit alone decides. */
    nvs_status (*reserve)(uint32_t gpu, uint64_t total_bytes);

    /* The same for memory that stays on the GPU whichever program has the lease, `total_bytes` in all.  NVS_UNAVAILABLE too where the
     * coordinator does not want to be asked. */
    nvs_status (*reserve_pins)(uint32_t gpu, uint64_t total_bytes);

    /* Asks that this program's share of the node's host memory be `total_bytes`, and waits, boundedly, until host/pool.h has been told
     * the answer; returns at once when there is nobody to ask. */
    void (*reserve_host)(uint64_t total_bytes);
} nvs_port;

extern const nvs_port nvs_coordinator __attribute__((visibility("hidden")));

#endif
