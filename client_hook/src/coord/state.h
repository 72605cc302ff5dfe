/* What the coordinator and the agent tell each other of this program's memory: its figures, how far the mover is, and the share of the node's host
 * memory.  Agent thread, except nvs_agent_reserve_host.
 *
 * The program's share of the node's budget of host memory is requested for allocations, kept across connections, and returned when idle.
 * A coordinator without budgets, or one that does not answer within two seconds, sets no bound: then only NVSHARE_HOST_LIMIT
 * applies.
 *
 * The coordinator orders moves.  Here they become goals of the mover: to evict, what is there less the bytes of the order; to restore, what is there and
 * the order's credit.  A GPU has one order.  It has ended when the mover rests and the goal does not rise any more, or with the next order; it is
 * answered once, unless its connection is lost.
 */
#ifndef NVS_STATE_H
#define NVS_STATE_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

bool nvs_report_is_due(uint32_t gpu);               /* the figures have changed since the last one */
uint64_t nvs_report_at(uint32_t gpu);               /* the earliest time, unless a release follows */
void nvs_report_memory(uint32_t gpu, uint64_t now_ns);

void nvs_agent_reserve_host(uint64_t total_bytes); /* behind base/base.h */
void nvs_budget_connected(void); /* the coordinator has accepted the connection */
void nvs_budget_lost(void);
void nvs_budget_answer(const nvs_host_reserved *answer);
bool nvs_budget_rejected(void);   /* the coordinator does not know a message; true: it was a request of this file */
uint64_t nvs_budget_serve(uint64_t now_ns); /* each round of the agent; returns the time of the next call at the latest */
bool nvs_budget_spare(void);      /* a few times a second: gives back what is not used; true: call again */

/* --- orders --- */

/* `credit_bytes`: room for so many bytes, now; of a restoration. */
void nvs_order_begin(uint8_t gpu, uint64_t id, bool out, uint64_t bytes, uint64_t credit_bytes);
void nvs_order_credit(const nvs_move_credit *more);
void nvs_orders_lost(void);            /* the connection: what is on the GPUs now stays there */
void nvs_orders_serve(void);           /* each round: reports progress and ends */
bool nvs_moves_busy(uint32_t gpu);     /* an order is open, or the mover has a goal: the gate stays closed */

void nvs_state_after_fork(void);

#endif
