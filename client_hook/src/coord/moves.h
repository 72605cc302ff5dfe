/* The memory that the coordinator steers: its orders to move memory, reports, and the share of the node's host memory.
 *
 * Orders are queued by the agent thread, carried out by one mover thread per GPU, answered by the agent thread.
 *
 * Invariants:
 *  - while a GPU has an unanswered order (`busy`), its gate stays closed and its lease does not go back;
 *  - orders of a GPU run one after the other, with the gate closed and the work drained;
 *  - each order is answered once, unless its connection is lost: then it ends early, without an answer;
 *  - an order waits for credit only while it is the newest and the GPU is not needed: a grant, another order, the end of a context or of the process ends
 *    it early.
 *
 * A mover starts with the first order of its GPU, blocks all signals, and sleeps while there is nothing to do.  Everything here is
 * for the agent thread, except nvs_moves_hurry and nvs_agent_reserve_host.
 *
 * The program's share of the node's budget of host memory is requested for allocations, kept across connections, and returned when idle.
 * A coordinator without budgets, or one that does not answer within two seconds, sets no bound: then only NVSHARE_HOST_LIMIT
 * applies.
 *
 * Non-goals: when memory may move (loop.c, lease.c), and how it does (memory/memory.h).
 */
#ifndef NVS_MOVES_H
#define NVS_MOVES_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

typedef struct nvs_move_order {
    uint32_t gpu;
    bool out;
    uint64_t order_id; /* 0: of the agent, which restores missing memory and calls `done` */
    uint64_t bytes;
    uint64_t credit_bytes; /* of a restoration: room for so many bytes; UINT64_MAX: for all */
    void (*done)(uint32_t gpu, uint64_t moved_bytes, uint32_t error); /* of the agent's order; agent thread; `error`: a CUresult */
} nvs_move_order;

void nvs_moves_begin(const nvs_move_order *order);
void nvs_moves_credit(uint32_t gpu, uint64_t order_id, uint64_t credit_bytes);
bool nvs_moves_busy(uint32_t gpu);
void nvs_moves_serve(void); /* each round: reports progress and ends */
void nvs_moves_abandon(void);  /* the connection is lost: its orders end without an answer */
void nvs_moves_abandon_own(uint32_t gpu); /* the agent's own order ends early: the lease must go back */
bool nvs_moves_stop(uint64_t patience_ns); /* the process ends: movers make no more calls; false: one still does */
/* Any thread: moves that wait for room end early.  A context of this GPU (NVS_NO_GPU: not known) is about to end. */
void nvs_moves_hurry(uint32_t gpu);
void nvs_moves_after_fork(void);

/* --- reports of this program's memory to the coordinator --- */

bool nvs_report_is_due(uint32_t gpu);               /* the figures have changed since the last one */
uint64_t nvs_report_at(uint32_t gpu);               /* the earliest time, unless a release follows */
void nvs_report_memory(uint32_t gpu, uint64_t now_ns);

/* --- the share of the node's host memory --- */

void nvs_agent_reserve_host(uint64_t total_bytes); /* behind base/base.h */
void nvs_budget_connected(void); /* the coordinator has accepted the connection */
void nvs_budget_lost(void);
void nvs_budget_answer(const nvs_host_reserved *answer);
bool nvs_budget_rejected(void);   /* the coordinator does not know a message; true: it was a request of this file */
uint64_t nvs_budget_serve(uint64_t now_ns); /* each round of the agent; returns the time of the next call at the latest */
bool nvs_budget_spare(void);      /* a few times a second: gives back what is not used; true: call again */
void nvs_budget_after_fork(void);

#endif
