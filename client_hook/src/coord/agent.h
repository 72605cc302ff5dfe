/* The agent: the thread of the hook that joins transport, lease, gate and memory.
 *
 * It starts with cuInit or the first thing that needs the coordinator, never before, and never in a process that does not use
 * CUDA.  Application threads talk to it through these functions only.
 */
#ifndef NVS_AGENT_H
#define NVS_AGENT_H

#include "base/base.h"

typedef struct nvs_settings { /* read once from the environment by init.c */
    bool enabled;
    char socket[108];        /* NVSHARE_SOCKET */
    int32_t coordinator_user;/* NVSHARE_COORDINATOR_USER: the user id that listens there; -1: not said */
    char name[64];           /* NVSHARE_NAME, else the program's */
    int32_t priority;        /* NVSHARE_PRIORITY */
    uint16_t weight;         /* NVSHARE_WEIGHT, 1 to 10000 */
    char gang[64];           /* NVSHARE_GANG; empty: none */
    uint8_t memory_mode;     /* NVSHARE_MEMORY: device | managed | swap */
    bool oversubscribe;      /* NVSHARE_OVERSUBSCRIBE=1: what does not fit on the GPU runs from the host, in mode swap */
    uint64_t memory_limit;   /* NVSHARE_MEMORY_LIMIT, bytes or 4GiB; 0: none */
    uint64_t host_limit;     /* NVSHARE_HOST_LIMIT, likewise: host memory for what is off the GPU in mode swap */
    bool run_on_loss;        /* NVSHARE_ON_LOSS=wait | run */
    uint64_t loss_timeout_ns;/* NVSHARE_LOSS_TIMEOUT, 30s by default: when `run` takes effect */
} nvs_settings;
extern nvs_settings nvs_config;

/* Blocks the calling thread until the gate of this GPU is not closed any more.  Starts the agent if need be.
 * False: the process is ending and the call must go through whatever the gate says, so that exit() cannot hang. */
bool nvs_agent_wait_for_lease(uint32_t gpu);

/* CUDA is about to be used: starts the agent, which connects while the driver begins, which takes longer. */
void nvs_agent_begin(void);

/* The GPU is about to be used: the coordinator hears of it meanwhile, so that nvs_agent_attach waits for less.  Only after cuInit. */
void nvs_agent_expect(uint32_t gpu);

/* Makes the GPU known to the coordinator and returns when its settings have come, or after a bounded wait without a
 * coordinator.  Called before the first allocation or memory figure; idempotent and quick afterwards. */
void nvs_agent_attach(uint32_t gpu);

/* Makes the reservation on this GPU at least `total_bytes`; waits for the coordinator's answer.
 * NVS_REFUSED: out of memory.  NVS_UNAVAILABLE: nobody to ask; then the local limit alone decides. */
nvs_status nvs_agent_reserve(uint32_t gpu, uint64_t total_bytes);

/* The same for what stays on the card whoever has the lease, `total_bytes` in all.  NVS_UNAVAILABLE too where the
 * coordinator does not want to be asked. */
nvs_status nvs_agent_reserve_pins(uint32_t gpu, uint64_t total_bytes);

/* Asks the coordinator that this program's share of the node's host memory be `total_bytes`, and waits, boundedly, until host_pool
 * has been told the answer; returns at once when there is nobody to ask. */
void nvs_agent_reserve_host(uint64_t total_bytes);

/* Usage changed; the report is sent soon, many changes in one. */
void nvs_agent_memory_changed(uint32_t gpu);
bool nvs_agent_memory_dirty(uint32_t gpu); /* a report is to be sent already; lease.c */

/* Moves that wait for room end with what they have: a context of this GPU (NVS_NO_GPU: not known which) is about to end. */
void nvs_agent_hurry_moves(uint32_t gpu);

void nvs_agent_goodbye(void);      /* at exit: bounded, best effort */
void nvs_agent_after_fork(void);   /* in the child: no thread, no socket, gates as at start */

#endif
