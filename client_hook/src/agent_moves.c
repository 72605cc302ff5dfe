/* See agent_moves.h. */
#include "agent_moves.h"

#include "agent_link.h"
#include "gate.h"
#include "memory.h"
#include "pacing.h"

#define PROGRESS_NS 20000000u
#define PROGRESS_BYTES (64u << 20)
#define SETTLE_NS 1000000000u /* what a release left undrained may still run so long */

typedef struct nvs_move {
    uint32_t gpu;
    uint64_t order_id, began_ns, told_ns, told_bytes;
} nvs_move;

static void tell_progress(void *argument, uint64_t moved_bytes)
{
    nvs_move *move = argument;
    uint64_t now = nvs_now_ns();
    if (moved_bytes < move->told_bytes + PROGRESS_BYTES && now < move->told_ns + PROGRESS_NS)
        return;
    move->told_bytes = moved_bytes;
    move->told_ns = now;
    NVS_LINK_SEND(move_progress, (uint8_t)move->gpu, move->order_id, moved_bytes, now - move->began_ns, false, 0);
}

nvs_moved nvs_agent_move(uint32_t gpu, uint64_t order_id, uint64_t bytes, bool out)
{
    uint64_t began = nvs_now_ns();
    nvs_move move = {gpu, order_id, began, began, 0};
    nvs_moved moved = {0};
    if (nvs_gate_close(gpu, began + SETTLE_NS) != NVS_OK || nvs_drain(gpu, began + SETTLE_NS) != NVS_OK) {
        moved.error = CUDA_ERROR_NOT_READY;
    } else {
        nvs_status status = out ? nvs_memory_evict(gpu, bytes, tell_progress, &move, &moved.bytes)
                                : nvs_memory_restore(gpu, bytes, tell_progress, &move, &moved.bytes);
        if (status != NVS_OK)
            moved.error = status == NVS_NO_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
    }
    moved.elapsed_ns = nvs_now_ns() - began;
    return moved;
}
