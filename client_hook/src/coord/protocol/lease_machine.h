/* The client's side of one GPU's lease: a state machine without sockets, threads, clocks or CUDA.
 *
 * The agent passes events to it, and carries out the actions that it returns, in the order of the bits.  Invariants, all tested:
 *  - the gate is open only with a lease, or after the loss of the coordinator if so configured, or when the GPU is not
 *    managed;
 *  - as long as a thread waits, a request is under way, or will be sent with the next AttachGpu;
 *  - every lease ends with exactly one release, or with the connection;
 *  - messages about another lease than the one held change nothing;
 *  - a client that connects again claims the lease that it holds.
 *
 * Non-goals: anything that includes more than wire.gen.h.
 */
#ifndef NVS_LEASE_H
#define NVS_LEASE_H

#include "coord/protocol/wire.gen.h"

typedef enum nvs_lease_state {
    NVS_LEASE_NONE = 0,    /* gate closed, nothing asked for */
    NVS_LEASE_ASKED,       /* gate closed, a request is with the coordinator */
    NVS_LEASE_HELD,        /* gate open under lease_id */
    NVS_LEASE_ENDING,      /* gate closed, draining; a release follows */
    NVS_LEASE_FREE,        /* no coordinator for too long and NVSHARE_ON_LOSS=run: gate open without a lease */
    NVS_LEASE_FREE_ENDING, /* the coordinator is back: gate closed, draining, then attach */
    NVS_LEASE_UNMANAGED,   /* the coordinator does not know this GPU: gate open for good */
} nvs_lease_state;

typedef enum nvs_lease_event_kind {
    NVS_LEASE_ON_WANTED = 0,   /* a thread waits before the closed gate */
    NVS_LEASE_ON_CONNECTED,    /* a connection is there and Hello is sent */
    NVS_LEASE_ON_DISCONNECTED,
    NVS_LEASE_ON_GRANT,        /* lease_id, number = waiters */
    NVS_LEASE_ON_REVOKE,       /* lease_id, number = drain deadline, relative ns */
    NVS_LEASE_ON_WAITERS,      /* lease_id, number = waiters */
    NVS_LEASE_ON_SETTINGS,     /* number = pacing budget, other = idle_release_ns */
    NVS_LEASE_ON_TICK,         /* number = gated calls ever, flag = a thread is in a call, or waits in one for its work */
    NVS_LEASE_ON_BUSY,         /* the gate was closed for idleness, but work was submitted before */
    NVS_LEASE_ON_DRAINED,      /* flag = a thread waits */
    NVS_LEASE_ON_YIELD,        /* the application gives the lease back if others wait */
    NVS_LEASE_ON_NOT_MANAGED,  /* this GPU cannot be managed */
} nvs_lease_event_kind;

typedef struct nvs_lease_event {
    nvs_lease_event_kind kind;
    uint64_t now_ns;
    uint64_t lease_id;
    uint64_t number;
    uint64_t other;
    bool flag;
} nvs_lease_event;

enum { /* what to do, in this order */
    NVS_LEASE_DO_CLOSE = 1,   /* close the gate, drain until end_by_ns, then tell DRAINED (or, when idle, BUSY) */
    NVS_LEASE_DO_RELEASE = 2, /* send Release: released_id, reason, release_wanted */
    NVS_LEASE_DO_ATTACH = 4,  /* send AttachGpu with lease_id and wanted */
    NVS_LEASE_DO_REQUEST = 8, /* send Request */
    NVS_LEASE_DO_OPEN = 16,   /* open the gate, paced or not; also when it is open and `paced` changed */
    NVS_LEASE_DO_WARN = 32,   /* log that the gate is open without a lease */
};

typedef struct nvs_lease {
    nvs_lease_state state;
    uint64_t lease_id;      /* held or ending; 0: none */
    uint64_t newest_id;     /* highest id granted on this connection */
    uint64_t released_id;   /* for DO_RELEASE; the last one on this connection */
    uint8_t reason;         /* for DO_RELEASE */
    bool release_wanted;    /* for DO_RELEASE */
    bool revoked;           /* while ENDING: it cannot be called off */
    bool connected;
    bool attached;          /* AttachGpu was sent on this connection */
    bool used;              /* the GPU is used at all: attach after each connection */
    bool wanted;
    bool paced;
    uint32_t waiters;
    uint64_t opened_at_ns;  /* for this lease */
    uint64_t end_by_ns;     /* while ENDING: deadline of the drain, absolute */
    uint64_t pacing_budget_ns;
    uint64_t idle_release_ns;
    uint64_t idle_since_ns; /* while HELD with waiters */
    uint32_t idle_backoff;  /* doublings of idle_release_ns, because a look at an idle GPU stops the program for a moment */
    uint64_t last_calls;
    bool run_on_loss;
    uint64_t loss_timeout_ns;
    uint64_t lost_since_ns; /* while not connected */
    bool watch_loss;        /* lost_since_ns counts */
} nvs_lease;

/* Drains that no Revoke has given a deadline. */
#define NVS_LEASE_DRAIN_NS 10000000000u

void nvs_lease_init(nvs_lease *lease, bool run_on_loss, uint64_t loss_timeout_ns);
uint32_t nvs_lease_handle(nvs_lease *lease, const nvs_lease_event *event);

/* The application begins to use this GPU: attach when connected. */
uint32_t nvs_lease_use(nvs_lease *lease, uint64_t now_ns);

/* When a TICK is due; UINT64_MAX: never.  Ticks detect idleness while others wait, and the loss of the coordinator. */
uint64_t nvs_lease_next_tick(const nvs_lease *lease, uint64_t now_ns);

bool nvs_lease_open(const nvs_lease *lease); /* whether the gate is to be open */

#endif
