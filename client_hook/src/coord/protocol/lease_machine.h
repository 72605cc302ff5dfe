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
 * A second machine is a duty cycle of the gate: the part of the time that a program may keep a GPU busy.
 *
 * Credit grows by `rate` thousandths of the time, and time from the opening of the gate to the end of the drain is taken from it.  The gate stays
 * closed until no debt is left, so that a drain that lasts too long delays the next cycle.
 *  - The gate is open for one burst at a time.  Credit never exceeds a burst, so idle time earns one cycle at most.
 *  - An open phase without a call takes nothing: the GPU was drained before it.
 *  - A debt survives a gate that is opened early.  It ends with the lease.
 *
 * Non-goals: anything that includes more than wire.gen.h.
 */
#ifndef NVS_LEASE_H
#define NVS_LEASE_H

#include "coord/protocol/wire.gen.h"

#include <stdbool.h>
#include <stdint.h>

typedef enum nvs_lease_state {
    NVS_LEASE_NONE = 0,    /* gate closed, no request */
    NVS_LEASE_ASKED,       /* gate closed, the coordinator has a request */
    NVS_LEASE_HELD,        /* gate open under grant.id */
    NVS_LEASE_ENDING,      /* gate closed, draining; a release follows */
    NVS_LEASE_FREE,        /* no coordinator for too long and NVSHARE_ON_LOSS=run: gate open without a lease */
    NVS_LEASE_FREE_ENDING, /* connected again: gate closed, draining, then attach */
    NVS_LEASE_UNMANAGED,   /* the coordinator does not know this GPU: gate open from now on */
    NVS_LEASE_FORBIDDEN,   /* this program may not use this GPU: gate closed from now on */
} nvs_lease_state;

typedef enum nvs_lease_event_kind {
    NVS_LEASE_ON_WANTED = 0,   /* a thread waits before the closed gate */
    NVS_LEASE_ON_CONNECTED,    /* the connection is open, and Hello is sent */
    NVS_LEASE_ON_DISCONNECTED,
    NVS_LEASE_ON_GRANT,        /* lease_id, number = waiters */
    NVS_LEASE_ON_REVOKE,       /* lease_id, number = drain deadline, relative ns */
    NVS_LEASE_ON_WAITERS,      /* lease_id, number = waiters */
    NVS_LEASE_ON_SETTINGS,     /* number = pacing budget, other = idle_release_ns */
    NVS_LEASE_ON_TICK,         /* number = gated calls in all, flag = a thread is in a call, or waits in one for its work */
    NVS_LEASE_ON_BUSY,         /* the gate was closed for idleness, but work had been submitted before */
    NVS_LEASE_ON_DRAINED,      /* flag = a thread waits */
    NVS_LEASE_ON_YIELD,        /* the application releases the lease if other programs wait */
    NVS_LEASE_ON_NOT_MANAGED,  /* this GPU cannot be managed; flag = the program may not use it */
} nvs_lease_event_kind;

typedef struct nvs_lease_event {
    nvs_lease_event_kind kind;
    uint64_t now_ns;
    uint64_t lease_id;
    uint64_t number;
    uint64_t other;
    bool flag;
} nvs_lease_event;

enum { /* actions, carried out in this order */
    NVS_LEASE_DO_CLOSE = 1,   /* close the gate, drain until end.deadline_ns, then pass DRAINED (or, when idle, BUSY) */
    NVS_LEASE_DO_RELEASE = 2, /* send Release with `release` */
    NVS_LEASE_DO_ATTACH = 4,  /* send AttachGpu with grant.id and wanted */
    NVS_LEASE_DO_REQUEST = 8, /* send Request */
    NVS_LEASE_DO_OPEN = 16,   /* open the gate, paced or not; also when it is open and `paced` changed */
    NVS_LEASE_DO_WARN = 32,   /* log that the gate is open without a lease */
};

typedef struct nvs_lease {
    nvs_lease_state state;
    bool wanted;               /* a thread waits for the GPU */
    bool paced;                /* the open gate is paced */
    struct {                   /* on_grant sets it, on_drained ends it */
        uint64_t id;           /* held or ending; 0: none */
        uint64_t newest_id;    /* highest id granted on this connection */
        uint64_t opened_at_ns;
        uint32_t waiters;      /* other programs that wait for the GPU */
    } grant;
    struct {                   /* while ENDING; begin_end and on_revoke set it */
        uint64_t deadline_ns;  /* of the drain, absolute */
        bool revoked;          /* the end cannot be cancelled */
    } end;
    struct {                   /* for DO_RELEASE; begin_end sets the reason, on_drained the rest */
        uint64_t id;           /* the last one on this connection */
        uint8_t reason;
        bool wanted;
    } release;
    struct {                   /* on_connected, on_disconnected, attach and nvs_lease_use set it */
        bool connected;
        bool attached;         /* AttachGpu was sent on this connection */
        bool used;             /* the GPU is used: attach after each connection */
    } link;
    struct {                   /* on_settings sets it */
        bool paced;            /* leases are paced */
        uint64_t idle_release_ns; /* 0: an idle lease is kept */
    } settings;
    struct {                   /* idleness while HELD with waiters; on_tick and on_busy set it */
        uint64_t since_ns;
        uint64_t calls;        /* gated calls at the last tick */
        uint32_t backoff;      /* doublings of idle_release_ns: each check closes the gate for a moment */
    } idle;
    struct {                   /* loss of the coordinator; nvs_lease_init sets the first two */
        bool run;              /* NVSHARE_ON_LOSS=run */
        uint64_t timeout_ns;
        bool counts;           /* since_ns counts */
        uint64_t since_ns;
    } loss;
} nvs_lease;

/* The time of a drain that no Revoke limits. */
#define NVS_LEASE_DRAIN_NS 10000000000u

void nvs_lease_init(nvs_lease *lease, bool run_on_loss, uint64_t loss_timeout_ns);
uint32_t nvs_lease_handle(nvs_lease *lease, const nvs_lease_event *event);

/* The application begins to use this GPU: attach when connected. */
uint32_t nvs_lease_use(nvs_lease *lease, uint64_t now_ns);

/* When a TICK is due; UINT64_MAX: never.  Ticks detect idleness while others wait, and the loss of the coordinator. */
uint64_t nvs_lease_next_tick(const nvs_lease *lease, uint64_t now_ns);

bool nvs_lease_open(const nvs_lease *lease); /* the gate is to be open */

/* --- the duty cycle --- */

enum { NVS_DUTY_ALWAYS = 1000 }; /* the rate without a limit */

typedef enum nvs_duty_phase {
    NVS_DUTY_OFF = 0, /* no limit, or no lease */
    NVS_DUTY_OPEN,
    NVS_DUTY_CLOSING, /* the gate is closed, or closes, and submitted work runs */
    NVS_DUTY_CLOSED,
} nvs_duty_phase;

typedef struct nvs_duty {
    nvs_duty_phase phase;
    uint16_t rate;     /* thousandths, 1 to NVS_DUTY_ALWAYS */
    int64_t credit_ns; /* negative: debt */
    uint64_t at_ns;    /* credit is counted up to here */
    uint64_t until_ns; /* end of the phase; while CLOSING: the next look at the drain */
    uint64_t calls;    /* gated calls ever, at the end of the last drain; UINT64_MAX: not known */
} nvs_duty;

void nvs_duty_init(nvs_duty *duty);
void nvs_duty_set_rate(nvs_duty *duty, uint32_t rate, uint64_t now_ns);
void nvs_duty_stop(nvs_duty *duty);                    /* the lease ends, or the limit */
void nvs_duty_opened(nvs_duty *duty, uint64_t now_ns); /* the gate opens under a lease, for whatever reason */

/* At the end of an open phase.  False: no call has come, and the gate stays open. */
bool nvs_duty_begin_close(nvs_duty *duty, uint64_t now_ns, uint64_t calls, bool inside);

/* The drain has not ended.  False: it has lasted so long that work may wait for a call before the gate, which has to open. */
bool nvs_duty_wait_on(nvs_duty *duty, uint64_t now_ns);
void nvs_duty_drained(nvs_duty *duty, uint64_t now_ns, uint64_t calls);

#endif
