/* Each event has one function, which returns the actions of the agent. */
#include "coord/protocol/lease_machine.h"

enum { LONGEST_TICK_NS = 1000000, LONGEST_BACKOFF = 4 };

static bool unmanaged(const nvs_lease *lease)
{
    return lease->state == NVS_LEASE_UNMANAGED || lease->state == NVS_LEASE_FORBIDDEN;
}

static uint32_t open_gate(nvs_lease *lease)
{
    lease->paced = lease->state == NVS_LEASE_HELD && lease->settings.paced;
    lease->wanted = false;
    return NVS_LEASE_DO_OPEN;
}

static uint32_t attach(nvs_lease *lease)
{
    lease->link.attached = true;
    /* AttachGpu carries `wanted`, so it is a request, too. */
    if (lease->state == NVS_LEASE_NONE && lease->wanted)
        lease->state = NVS_LEASE_ASKED;
    return NVS_LEASE_DO_ATTACH;
}

static uint32_t begin_end(nvs_lease *lease, uint8_t reason, bool revoked, uint64_t deadline_ns)
{
    lease->state = NVS_LEASE_ENDING;
    lease->release.reason = reason;
    lease->end.revoked = revoked;
    lease->end.deadline_ns = deadline_ns;
    return NVS_LEASE_DO_CLOSE;
}

static uint64_t later(uint64_t now_ns, uint64_t delay_ns)
{
    return delay_ns > UINT64_MAX - 1 - now_ns ? UINT64_MAX - 1 : now_ns + delay_ns;
}

static uint32_t on_wanted(nvs_lease *lease, const nvs_lease_event *event)
{
    if (nvs_lease_open(lease) || lease->wanted)
        return nvs_lease_use(lease, event->now_ns);
    lease->wanted = true;
    uint32_t todo = nvs_lease_use(lease, event->now_ns); /* AttachGpu carries `wanted` */
    if (lease->state != NVS_LEASE_NONE || !lease->link.attached)
        return todo;
    lease->state = NVS_LEASE_ASKED;
    return todo | NVS_LEASE_DO_REQUEST;
}

static uint32_t on_connected(nvs_lease *lease)
{
    lease->link.connected = true;
    lease->loss.counts = false;
    /* Leases of an earlier coordinator count only if this one confirms the claim. */
    lease->grant.newest_id = 0;
    lease->release.id = 0;
    if (unmanaged(lease) || !lease->link.used)
        return 0;
    if (lease->state == NVS_LEASE_FREE) {
        lease->state = NVS_LEASE_FREE_ENDING;
        lease->end.deadline_ns = UINT64_MAX;
        return NVS_LEASE_DO_CLOSE;
    }
    if (lease->state == NVS_LEASE_FREE_ENDING)
        return 0; /* attaches when drained */
    return attach(lease);
}

static uint32_t on_disconnected(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->link.connected || !lease->loss.counts)
        lease->loss.since_ns = event->now_ns;
    lease->loss.counts = true;
    lease->link.connected = false;
    lease->link.attached = false;
    lease->grant.waiters = 0; /* a lost connection tells of none */
    if (lease->state == NVS_LEASE_ASKED)
        lease->state = NVS_LEASE_NONE; /* the next AttachGpu carries `wanted` */
    return 0;
}

static uint32_t on_grant(nvs_lease *lease, const nvs_lease_event *event)
{
    if (!lease->link.attached || event->lease_id == 0 || event->lease_id < lease->grant.newest_id)
        return 0;
    switch (lease->state) {
    case NVS_LEASE_HELD: /* confirmed after a loss; a higher id takes its place */
        if (event->lease_id < lease->grant.id)
            return 0;
        lease->grant.id = event->lease_id;
        break;
    case NVS_LEASE_NONE:
    case NVS_LEASE_ASKED:
        if (event->lease_id == lease->grant.newest_id || event->lease_id == lease->release.id)
            return 0; /* given back already */
        lease->grant.id = event->lease_id;
        lease->state = NVS_LEASE_HELD;
        lease->grant.opened_at_ns = event->now_ns;
        break;
    case NVS_LEASE_ENDING:
        if (event->lease_id == lease->grant.id)
            lease->grant.waiters = (uint32_t)event->number;
        return 0; /* the claim is confirmed; a release follows */
    default:
        return 0;
    }
    lease->grant.newest_id = event->lease_id;
    lease->grant.waiters = (uint32_t)event->number;
    lease->idle.since_ns = event->now_ns;
    lease->idle.backoff = 0;
    return open_gate(lease);
}

static uint32_t on_revoke(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->grant.id == 0 || event->lease_id != lease->grant.id)
        return 0;
    uint64_t deadline = later(event->now_ns, event->number);
    if (lease->state == NVS_LEASE_ENDING) {
        lease->end.revoked = true;
        if (deadline < lease->end.deadline_ns)
            lease->end.deadline_ns = deadline;
        return 0;
    }
    return lease->state == NVS_LEASE_HELD ? begin_end(lease, NVS_RELEASE_REASON_REVOKED, true, deadline) : 0;
}

static uint32_t on_waiters(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->grant.id != 0 && event->lease_id == lease->grant.id) {
        if (lease->grant.waiters == 0)
            lease->idle.since_ns = event->now_ns;
        lease->grant.waiters = (uint32_t)event->number;
    }
    return 0;
}

static uint32_t on_settings(nvs_lease *lease, const nvs_lease_event *event)
{
    lease->settings.paced = event->number != 0;
    lease->settings.idle_release_ns = event->other;
    return lease->state == NVS_LEASE_HELD && lease->paced != lease->settings.paced ? open_gate(lease) : 0;
}

static uint32_t on_tick(nvs_lease *lease, const nvs_lease_event *event)
{
    if (!lease->link.connected && lease->loss.counts && lease->loss.run && lease->wanted &&
        (lease->state == NVS_LEASE_NONE || lease->state == NVS_LEASE_ASKED) &&
        event->now_ns >= later(lease->loss.since_ns, lease->loss.timeout_ns)) {
        lease->state = NVS_LEASE_FREE;
        return open_gate(lease) | NVS_LEASE_DO_WARN;
    }
    if (lease->state != NVS_LEASE_HELD || lease->grant.waiters == 0 || lease->settings.idle_release_ns == 0)
        return 0;
    if (event->flag || event->number != lease->idle.calls) {
        lease->idle.calls = event->number;
        lease->idle.since_ns = event->now_ns;
        lease->idle.backoff = 0; /* the next idleness is detected soon */
        return 0;
    }
    if (event->now_ns < later(lease->idle.since_ns, lease->settings.idle_release_ns << lease->idle.backoff))
        return 0;
    return begin_end(lease, NVS_RELEASE_REASON_IDLE, false, later(event->now_ns, NVS_LEASE_DRAIN_NS));
}

static uint32_t on_busy(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state != NVS_LEASE_ENDING || lease->end.revoked)
        return 0; /* a revoked lease is released in any case */
    lease->state = NVS_LEASE_HELD;
    lease->idle.since_ns = event->now_ns;
    lease->idle.backoff += lease->idle.backoff < LONGEST_BACKOFF; /* bounds the delay of the next check */
    return open_gate(lease);
}

static uint32_t on_drained(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state == NVS_LEASE_FREE_ENDING) {
        lease->state = NVS_LEASE_NONE;
        lease->wanted = event->flag;
        return lease->link.connected ? attach(lease) : 0;
    }
    if (lease->state != NVS_LEASE_ENDING)
        return 0;
    lease->state = NVS_LEASE_NONE;
    lease->wanted = event->flag;
    lease->release.id = lease->grant.id;
    lease->grant.id = 0;
    lease->grant.waiters = 0;
    lease->paced = false;
    if (!lease->link.attached)
        return 0; /* the lease has ended with the connection */
    lease->release.wanted = lease->wanted;
    if (lease->wanted)
        lease->state = NVS_LEASE_ASKED;
    return NVS_LEASE_DO_RELEASE;
}

static uint32_t on_yield(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state != NVS_LEASE_HELD || lease->grant.waiters == 0)
        return 0;
    return begin_end(lease, NVS_RELEASE_REASON_IDLE, true, later(event->now_ns, NVS_LEASE_DRAIN_NS));
}

static uint32_t on_not_managed(nvs_lease *lease, const nvs_lease_event *event)
{
    lease->link.attached = false; /* the coordinator takes no more messages about it */
    if (event->flag && (lease->state == NVS_LEASE_HELD || lease->state == NVS_LEASE_ENDING))
        return lease->state == NVS_LEASE_HELD ? begin_end(lease, NVS_RELEASE_REASON_REVOKED, true, later(event->now_ns, NVS_LEASE_DRAIN_NS)) : 0;
    lease->state = event->flag ? NVS_LEASE_FORBIDDEN : NVS_LEASE_UNMANAGED;
    lease->grant.id = 0;
    lease->grant.waiters = 0;
    lease->wanted = false;
    return event->flag ? 0 : open_gate(lease);
}

uint32_t nvs_lease_handle(nvs_lease *lease, const nvs_lease_event *event)
{
    if (unmanaged(lease) && event->kind != NVS_LEASE_ON_CONNECTED &&
        event->kind != NVS_LEASE_ON_DISCONNECTED)
        return 0;
    switch (event->kind) {
    case NVS_LEASE_ON_WANTED: return on_wanted(lease, event);
    case NVS_LEASE_ON_CONNECTED: return on_connected(lease);
    case NVS_LEASE_ON_DISCONNECTED: return on_disconnected(lease, event);
    case NVS_LEASE_ON_GRANT: return on_grant(lease, event);
    case NVS_LEASE_ON_REVOKE: return on_revoke(lease, event);
    case NVS_LEASE_ON_WAITERS: return on_waiters(lease, event);
    case NVS_LEASE_ON_SETTINGS: return on_settings(lease, event);
    case NVS_LEASE_ON_TICK: return on_tick(lease, event);
    case NVS_LEASE_ON_BUSY: return on_busy(lease, event);
    case NVS_LEASE_ON_DRAINED: return on_drained(lease, event);
    case NVS_LEASE_ON_YIELD: return on_yield(lease, event);
    case NVS_LEASE_ON_NOT_MANAGED: return on_not_managed(lease, event);
    }
    return 0;
}

void nvs_lease_init(nvs_lease *lease, bool run_on_loss, uint64_t loss_timeout_ns)
{
    memset(lease, 0, sizeof *lease);
    lease->loss.run = run_on_loss;
    lease->loss.timeout_ns = loss_timeout_ns;
}

uint32_t nvs_lease_use(nvs_lease *lease, uint64_t now_ns)
{
    if (lease->link.used)
        return 0;
    lease->link.used = true;
    if (lease->link.connected)
        return attach(lease);
    if (!lease->loss.counts) {
        lease->loss.counts = true;
        lease->loss.since_ns = now_ns;
    }
    return 0;
}

uint64_t nvs_lease_next_tick(const nvs_lease *lease, uint64_t now_ns)
{
    if (lease->state == NVS_LEASE_HELD && lease->grant.waiters > 0 && lease->settings.idle_release_ns != 0) {
        uint64_t step = lease->settings.idle_release_ns / 2;
        return later(now_ns, step < LONGEST_TICK_NS ? step : LONGEST_TICK_NS);
    }
    if (!lease->link.connected && lease->loss.counts && lease->loss.run && lease->wanted && !nvs_lease_open(lease) &&
        lease->state != NVS_LEASE_ENDING && lease->state != NVS_LEASE_FREE_ENDING)
        return later(lease->loss.since_ns, lease->loss.timeout_ns);
    return UINT64_MAX;
}

bool nvs_lease_open(const nvs_lease *lease)
{
    return lease->state == NVS_LEASE_HELD || lease->state == NVS_LEASE_FREE || lease->state == NVS_LEASE_UNMANAGED;
}

#define PERIOD_NS INT64_C(30000000)
#define SHORTEST_OPEN_NS INT64_C(1000000)     /* a lower rate makes the period longer */
#define LONGEST_CLOSED_NS INT64_C(10000000000) /* after one very long kernel */
#define LONGEST_DRAIN_NS UINT64_C(1000000000)
#define LONGEST_NAP_NS UINT64_C(5000000)

static int64_t burst_ns(const nvs_duty *duty)
{
    const int64_t part = PERIOD_NS * duty->rate / NVS_DUTY_ALWAYS;
    return part > SHORTEST_OPEN_NS ? part : SHORTEST_OPEN_NS;
}

static void count(nvs_duty *duty, uint64_t now_ns, bool used)
{
    const int64_t elapsed = (int64_t)(now_ns - duty->at_ns);
    duty->credit_ns += elapsed / NVS_DUTY_ALWAYS * duty->rate + elapsed % NVS_DUTY_ALWAYS * duty->rate / NVS_DUTY_ALWAYS;
    if (used)
        duty->credit_ns -= elapsed;
    if (duty->credit_ns > burst_ns(duty))
        duty->credit_ns = burst_ns(duty);
    duty->at_ns = now_ns;
}

static bool uses(const nvs_duty *duty)
{
    return duty->phase == NVS_DUTY_OPEN || duty->phase == NVS_DUTY_CLOSING;
}

static uint64_t without_debt_ns(const nvs_duty *duty, uint64_t now_ns)
{
    if (duty->credit_ns >= 0)
        return now_ns;
    const int64_t most = LONGEST_CLOSED_NS * duty->rate / NVS_DUTY_ALWAYS;
    const int64_t debt = -duty->credit_ns < most ? -duty->credit_ns : most;
    return now_ns + (uint64_t)((debt * NVS_DUTY_ALWAYS + duty->rate - 1) / duty->rate);
}

void nvs_duty_init(nvs_duty *duty)
{
    duty->rate = NVS_DUTY_ALWAYS;
    nvs_duty_stop(duty);
}

void nvs_duty_stop(nvs_duty *duty)
{
    *duty = (nvs_duty){.rate = duty->rate, .calls = UINT64_MAX};
}

void nvs_duty_set_rate(nvs_duty *duty, uint32_t rate, uint64_t now_ns)
{
    if (duty->phase != NVS_DUTY_OFF)
        count(duty, now_ns, uses(duty));
    duty->rate = (uint16_t)(rate == 0 ? 1 : rate < NVS_DUTY_ALWAYS ? rate : NVS_DUTY_ALWAYS); /* never without an end */
    if (duty->rate == NVS_DUTY_ALWAYS)
        nvs_duty_stop(duty);
    else if (duty->phase == NVS_DUTY_OPEN && duty->until_ns > now_ns + (uint64_t)burst_ns(duty))
        duty->until_ns = now_ns + (uint64_t)burst_ns(duty);
    else if (duty->phase == NVS_DUTY_CLOSED)
        duty->until_ns = without_debt_ns(duty, now_ns);
}

void nvs_duty_opened(nvs_duty *duty, uint64_t now_ns)
{
    if (duty->rate == NVS_DUTY_ALWAYS)
        return;
    if (duty->phase == NVS_DUTY_OFF)
        duty->at_ns = now_ns;
    count(duty, now_ns, uses(duty));
    duty->phase = NVS_DUTY_OPEN;
    duty->until_ns = now_ns + (uint64_t)burst_ns(duty);
}

bool nvs_duty_begin_close(nvs_duty *duty, uint64_t now_ns, uint64_t calls, bool inside)
{
    const bool idle = calls == duty->calls && !inside;
    count(duty, now_ns, !idle);
    if (idle)
        duty->until_ns = now_ns + (uint64_t)burst_ns(duty);
    else
        duty->phase = NVS_DUTY_CLOSING;
    return !idle;
}

bool nvs_duty_wait_on(nvs_duty *duty, uint64_t now_ns)
{
    const uint64_t lasted = now_ns - duty->at_ns; /* credit was counted when the close began */
    const uint64_t nap = lasted / 16; /* few looks at a long kernel */
    duty->until_ns = now_ns + (nap < LONGEST_NAP_NS ? nap : LONGEST_NAP_NS);
    return lasted < LONGEST_DRAIN_NS;
}

void nvs_duty_drained(nvs_duty *duty, uint64_t now_ns, uint64_t calls)
{
    count(duty, now_ns, true);
    duty->phase = NVS_DUTY_CLOSED;
    duty->calls = calls;
    duty->until_ns = without_debt_ns(duty, now_ns);
}
