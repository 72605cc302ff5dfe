/* Orders to move memory: queued by the agent thread, carried out by one mover thread per GPU, answered by the agent thread.
 *
 * Invariants:
 *  - while a GPU has an order that is not answered (`busy`), its gate stays closed and its lease does not go back;
 *  - an order is carried out with the gate closed and the work drained, one after the other;
 *  - each order is answered once, unless the connection that it came by is lost: then it ends with what has moved;
 *  - an order waits for credit only while it is the newest and nobody wants the GPU: a grant, another order, the end of a context or
 *    of the process ends it with what has moved.
 *
 * A mover starts with the first order of its GPU, blocks all signals, and sleeps while there is nothing to do.  Everything here is
 * for the agent thread, except nvs_moves_hurry.
 *
 * Non-goals: when memory may move (loop.c, lease.c), and how it does (memory/memory.h).
 */
#ifndef NVS_MOVES_H
#define NVS_MOVES_H

#include "base/base.h"

typedef struct nvs_move_order {
    uint32_t gpu;
    bool out;
    uint64_t order_id; /* 0: our own, which brings in what is missing and ends with `done` */
    uint64_t bytes;
    uint64_t credit_bytes; /* of a restoration: there is room for so many now; UINT64_MAX: for all */
    void (*done)(uint32_t gpu, uint64_t moved_bytes, uint32_t error); /* of our own; agent thread; `error`: a CUresult */
} nvs_move_order;

void nvs_moves_begin(const nvs_move_order *order);
void nvs_moves_credit(uint32_t gpu, uint64_t order_id, uint64_t credit_bytes);
bool nvs_moves_busy(uint32_t gpu);
void nvs_moves_serve(void); /* each round: tells the coordinator what has moved and what has ended */
void nvs_moves_void(void);  /* the connection is lost: what was ordered ends, and nobody is told */
void nvs_moves_cut(uint32_t gpu); /* our own order ends with what has moved: the lease must go back */
bool nvs_moves_stop(uint64_t patience_ns); /* the process ends: movers call nothing any more; false: one still does */
/* Any thread: moves that wait for room end with what they have.  A context of this GPU (NVS_NO_GPU: not known which) is about to end. */
void nvs_moves_hurry(uint32_t gpu);
void nvs_moves_after_fork(void);

#endif
