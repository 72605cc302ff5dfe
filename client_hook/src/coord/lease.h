/* The agent's actions for the lease of one GPU, in the order of the state machine (coord/protocol/lease_machine.h).  Agent thread only.
 *
 * Non-goals: received messages, sleeping (loop.c).
 */
#ifndef NVS_AGENT_LEASE_H
#define NVS_AGENT_LEASE_H

#include "base/base.h"
#include "coord/protocol/lease_machine.h"
#include "coord/protocol/wire.gen.h"

typedef struct nvs_agent_gpu {
    nvs_lease lease;
    nvs_duty duty;             /* the gate may be closed though the lease is held */
    uint64_t tick_at_ns;
    uint64_t pacing_budget_ns; /* of the settings */
    struct {                   /* the calls before a lease, for its Release */
        uint64_t lease_id;
        uint64_t calls;
    } counted;
    struct {                   /* the end of a lease: nvs_agent_carry_out, nvs_agent_continue_end */
        bool closed;           /* the gate is closed, and no thread is inside */
        uint64_t began_ns;
        uint64_t since_ns;     /* the last closing of the gate */
        uint64_t patience_ns;  /* before calls are let in */
        uint64_t calls;        /* gated calls before it */
    } closing;
    struct {                   /* the begin of a lease: open_gate, nvs_agent_continue_open */
        bool pending;          /* the gate stays closed: memory is missing on the GPU, or moves */
        bool restoring;        /* the mover restores it, or comes to rest first */
        bool aimed;            /* the mover restores it for this opening */
        uint64_t in_bytes;     /* what the mover had brought in before */
        bool incomplete;       /* nothing is missing here, but the lease or memory of a linked GPU is */
        uint32_t tries;        /* to restore it */
        uint64_t since_ns;
        uint64_t patience_ns;  /* before the next try */
    } opening;
    bool settled;              /* settings have been received on this connection */
} nvs_agent_gpu;

extern nvs_agent_gpu nvs_agent_gpus[NVS_MAX_GPUS];
static inline bool nvs_agent_knows(uint32_t gpu) /* the application uses it, and its UUID is known */
{
    return nvs_agent_gpus[gpu].lease.link.used;
}

void nvs_agent_event(uint32_t gpu, const nvs_lease_event *event);         /* fills in the time */
void nvs_agent_carry_out(uint32_t gpu, uint32_t todo, bool drained);       /* the actions of nvs_lease_handle() */
void nvs_agent_set_pacing(uint32_t gpu, uint64_t budget_ns, uint64_t idle_release_ns); /* of received settings */
void nvs_agent_set_rate(uint32_t gpu, uint32_t rate);                      /* the part of the time that the gate may be open, in thousandths */
uint64_t nvs_agent_hold_rate(uint32_t gpu);                                /* one slice; returns the time of the next, UINT64_MAX: none */
void nvs_agent_close_and_open(uint32_t gpu);                               /* the mover waits for the gate and for work, and restores memory */
void nvs_agent_link_gpus(uint32_t gpus);                                   /* from now on these have one turn */
bool nvs_agent_ending(const nvs_agent_gpu *mine);
void nvs_agent_tick(uint32_t gpu);                                          /* is the lease idle? */
bool nvs_agent_wanted(uint32_t gpu);                                       /* threads wait for this GPU, or for one that is linked with it */
void nvs_agent_continue_end(uint32_t gpu);                                 /* one slice of closing and draining */
void nvs_agent_continue_open(uint32_t gpu, uint64_t now);                  /* while `opening` is pending */

/* --- reports of this program's progress --- */

void nvs_progress_start(void);                               /* at the start of the agent */
void nvs_progress_want(uint32_t gpu, bool report, bool watch); /* as GpuSettings; without a connection neither */
/* Reports if due.  `lease_id` is the lease under which the program runs, 0: it does not run.  Returns when to serve again,
 * UINT64_MAX: never. */
uint64_t nvs_progress_serve(uint32_t gpu, uint64_t lease_id, uint64_t now);

#endif
