/* The program's share of the node's budget of host memory: requested for allocations, kept across connections, returned when idle.
 *
 * A coordinator without budgets, or one that does not answer within two seconds, sets no bound: then only NVSHARE_HOST_LIMIT
 * applies.  Only the agent thread calls these functions, except nvs_agent_reserve_host.
 *
 * Non-goals: the use of the memory (host/pool.h).
 */
#ifndef NVS_BUDGET_H
#define NVS_BUDGET_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

void nvs_agent_reserve_host(uint64_t total_bytes); /* behind base/base.h */
void nvs_budget_connected(void); /* the coordinator has accepted the connection */
void nvs_budget_lost(void);
void nvs_budget_answer(const nvs_host_reserved *answer);
bool nvs_budget_rejected(void);   /* the coordinator does not know a message; true: it was a request of this file */
uint64_t nvs_budget_serve(uint64_t now_ns); /* each round of the agent; returns the time of the next call at the latest */
void nvs_budget_after_fork(void);

#endif
