/* This program's share of the node's budget of host memory: asked for on behalf of allocations, kept over connections, given back.
 *
 * A coordinator that does not know of budgets, or does not answer within two seconds, sets no bound: then NVSHARE_HOST_LIMIT alone
 * holds.  Everything here is for the agent thread, except nvs_agent_reserve_host.
 *
 * May not go here: what the memory is for (host/pool.h).
 */
#ifndef NVS_AGENT_HOST_H
#define NVS_AGENT_HOST_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

void nvs_agent_reserve_host(uint64_t total_bytes); /* behind base/port.h */
void nvs_budget_connected(void); /* welcome was said */
void nvs_budget_lost(void);
void nvs_budget_answer(const nvs_host_reserved *answer);
bool nvs_budget_rejected(void);   /* a message was not known: was it ours? */
uint64_t nvs_budget_serve(uint64_t now_ns); /* each round; when next at the latest */
void nvs_budget_after_fork(void);

#endif
