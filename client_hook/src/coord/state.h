/* The messages about this program's memory: its State with its questions, and its Target with the answers.  Agent thread, except
 * nvs_agent_reserve_host.
 *
 * A Target becomes a goal of the mover.  A State is sent with the mover's news, and soon after the figures have changed.  A mover that restores memory
 * for the gate to open (lease.c) works for no target: the newest one is at rest.
 *
 * A question of a mailbox (nvs_question_ask) goes out with the next State, at once, and is repeated until a Target answers it, also on the next
 * connection.  From then on a State has the reservation itself, so that less gives back.
 *
 * The program's share of the node's budget of host memory is requested for allocations, kept across connections, and returned when idle.
 * A coordinator that does not answer within two seconds sets no bound: then only NVSHARE_HOST_LIMIT applies.
 */
#ifndef NVS_STATE_H
#define NVS_STATE_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

void nvs_state_attached(uint32_t gpu);  /* AttachGpu goes out on this connection: numbers and sums begin */
uint64_t nvs_state_due(uint32_t gpu);   /* when to send one; UINT64_MAX: nothing has changed since the last */
void nvs_state_send(uint32_t gpu);
void nvs_target_received(const nvs_target *target, bool leased); /* with a lease the target is refused */
void nvs_targets_look(void);            /* each round: how far the movers are */
void nvs_states_lost(void);             /* the connection: what is on the GPUs now stays there, and no share is known */

void nvs_agent_reserve_host(uint64_t total_bytes); /* behind base/base.h */
void nvs_budget_connected(void); /* the coordinator has accepted the connection */
void nvs_budget_received(const nvs_target *target);
uint64_t nvs_budget_serve(uint64_t now_ns); /* each round of the agent; returns the time of the next call at the latest */
bool nvs_budget_spare(void);      /* a few times a second: gives back what is not used; true: call again */

void nvs_state_after_fork(void);

#endif
