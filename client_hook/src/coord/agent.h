/* The agent: the thread of the hook that joins transport, lease, gate and memory.
 *
 * It starts with cuInit or the first call that needs the coordinator, and never in a process that does not use CUDA.  Application threads use it by these
 * functions only.
 */
#ifndef NVS_AGENT_H
#define NVS_AGENT_H

#include "base/base.h"

/* Before cuInit: starts the agent, which connects while the driver initialises. */
void nvs_agent_begin(void);
/* After cuInit: the memory mode is known, so the agent may introduce the program; and at exit() it ends before a driver that is ready does. */
void nvs_agent_driver_begun(bool ready);

/* Before the first use of a GPU, after cuInit: attaches in the background, so that nvs_agent_attach waits less. */
void nvs_agent_expect(uint32_t gpu);

/* Behind base/base.h. */
void nvs_agent_wait_for_lease(uint32_t gpu); /* starts the agent if need be */
void nvs_agent_attach(uint32_t gpu);
void nvs_agent_memory_changed(uint32_t gpu);
nvs_status nvs_agent_reserve(uint32_t gpu, uint64_t total_bytes, uint64_t lacking_bytes);
nvs_status nvs_agent_reserve_pins(uint32_t gpu, uint64_t total_bytes);
void nvs_agent_link(uint32_t gpus);
nvs_status nvs_agent_reopen(uint32_t gpu);

void nvs_agent_after_fork(void); /* in the child: no thread, no socket, gates as at start */

#endif
