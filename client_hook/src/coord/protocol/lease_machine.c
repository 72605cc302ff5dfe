/* See lease_machine.h.  Each event has one function; each answers with what the agent is to do. */
#include "coord/protocol/lease_machine.h"

enum { LONGEST_TICK_NS = 1000000, LONGEST_BACKOFF = 4 };

static uint32_t open_gate(nvs_lease *lease)
{
    lease->paced = lease->state == NVS_LEASE_HELD && lease->pacing_budget_ns != 0;
    lease->wanted = false;
    return NVS_LEASE_DO_OPEN;
}

static uint32_t attach(nvs_lease *lease)
{
    lease->attached = true;
    /* `wanted` travels with AttachGpu, so it is a request too. */
    if (lease->state == NVS_LEASE_NONE && lease->wanted)
        lease->state = NVS_LEASE_ASKED;
    return NVS_LEASE_DO_ATTACH;
}

static uint32_t begin_end(nvs_lease *lease, uint8_t reason, bool revoked, uint64_t deadline_ns)
{
    lease->state = NVS_LEASE_ENDING;
    lease->reason = reason;
    lease->revoked = revoked;
    lease->end_by_ns = deadline_ns;
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
    uint32_t todo = nvs_lease_use(lease, event->now_ns); /* AttachGpu carries the wish */
    if (lease->state != NVS_LEASE_NONE || !lease->attached)
        return todo;
    lease->state = NVS_LEASE_ASKED;
    return todo | NVS_LEASE_DO_REQUEST;
}

static uint32_t on_connected(nvs_lease *lease)
{
    lease->connected = true;
    lease->watch_loss = false;
    /* Leases of an earlier coordinator count only if this one confirms the claim. */
    lease->newest_id = 0;
    lease->released_id = 0;
    if (lease->state == NVS_LEASE_UNMANAGED || !lease->used)
        return 0;
    if (lease->state == NVS_LEASE_FREE) {
        lease->state = NVS_LEASE_FREE_ENDING;
        lease->end_by_ns = UINT64_MAX;
        return NVS_LEASE_DO_CLOSE;
    }
    if (lease->state == NVS_LEASE_FREE_ENDING)
        return 0; /* attaches when drained */
    return attach(lease);
}

static uint32_t on_disconnected(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->connected || !lease->watch_loss)
        lease->lost_since_ns = event->now_ns;
    lease->watch_loss = true;
    lease->connected = false;
    lease->attached = false;
    lease->waiters = 0; /* nobody waits on a lost connection */
    if (lease->state == NVS_LEASE_ASKED)
        lease->state = NVS_LEASE_NONE; /* `wanted` goes with the next AttachGpu */
    return 0;
}

static uint32_t on_grant(nvs_lease *lease, const nvs_lease_event *event)
{
    if (!lease->attached || event->lease_id == 0 || event->lease_id < lease->newest_id)
        return 0;
    switch (lease->state) {
    case NVS_LEASE_HELD: /* confirmed after a loss; a higher id takes its place */
        if (event->lease_id < lease->lease_id)
            return 0;
        lease->lease_id = event->lease_id;
        break;
    case NVS_LEASE_NONE:
    case NVS_LEASE_ASKED:
        if (event->lease_id == lease->newest_id || event->lease_id == lease->released_id)
            return 0; /* given back already */
        lease->lease_id = event->lease_id;
        lease->state = NVS_LEASE_HELD;
        lease->opened_at_ns = event->now_ns;
        break;
    case NVS_LEASE_ENDING:
        if (event->lease_id == lease->lease_id)
            lease->waiters = (uint32_t)event->number;
        return 0; /* the claim is confirmed; the release is on its way */
    default:
        return 0;
    }
    lease->newest_id = event->lease_id;
    lease->waiters = (uint32_t)event->number;
    lease->idle_since_ns = event->now_ns;
    lease->idle_backoff = 0;
    return open_gate(lease);
}

static uint32_t on_revoke(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->lease_id == 0 || event->lease_id != lease->lease_id)
        return 0;
    uint64_t deadline = later(event->now_ns, event->number);
    if (lease->state == NVS_LEASE_ENDING) {
        lease->revoked = true;
        if (deadline < lease->end_by_ns)
            lease->end_by_ns = deadline;
        return 0;
    }
    return lease->state == NVS_LEASE_HELD ? begin_end(lease, NVS_RELEASE_REASON_REVOKED, true, deadline) : 0;
}

static uint32_t on_waiters(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->lease_id != 0 && event->lease_id == lease->lease_id) {
        if (lease->waiters == 0)
            lease->idle_since_ns = event->now_ns;
        lease->waiters = (uint32_t)event->number;
    }
    return 0;
}

static uint32_t on_settings(nvs_lease *lease, const nvs_lease_event *event)
{
    bool paced = lease->paced;
    lease->pacing_budget_ns = event->number;
    lease->idle_release_ns = event->other;
    if (lease->state != NVS_LEASE_HELD || paced == (event->number != 0))
        return 0;
    return open_gate(lease);
}

static uint32_t on_tick(nvs_lease *lease, const nvs_lease_event *event)
{
    if (!lease->connected && lease->watch_loss && lease->run_on_loss && lease->wanted &&
        (lease->state == NVS_LEASE_NONE || lease->state == NVS_LEASE_ASKED) &&
        event->now_ns >= later(lease->lost_since_ns, lease->loss_timeout_ns)) {
        lease->state = NVS_LEASE_FREE;
        return open_gate(lease) | NVS_LEASE_DO_WARN;
    }
    if (lease->state != NVS_LEASE_HELD || lease->waiters == 0 || lease->idle_release_ns == 0)
        return 0;
    if (event->flag || event->number != lease->last_calls) {
        lease->last_calls = event->number;
        lease->idle_since_ns = event->now_ns;
        lease->idle_backoff = 0; /* the next idleness is noticed soon */
        return 0;
    }
    if (event->now_ns < later(lease->idle_since_ns, lease->idle_release_ns << lease->idle_backoff))
        return 0;
    return begin_end(lease, NVS_RELEASE_REASON_IDLE, false, later(event->now_ns, NVS_LEASE_DRAIN_NS));
}

static uint32_t on_busy(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state != NVS_LEASE_ENDING || lease->revoked)
        return 0; /* a revoked lease goes back in any case */
    lease->state = NVS_LEASE_HELD;
    lease->idle_since_ns = event->now_ns;
    lease->idle_backoff += lease->idle_backoff < LONGEST_BACKOFF; /* bounds the delay of the next look */
    return open_gate(lease);
}

static uint32_t on_drained(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state == NVS_LEASE_FREE_ENDING) {
        lease->state = NVS_LEASE_NONE;
        lease->wanted = event->flag;
        return lease->connected ? attach(lease) : 0;
    }
    if (lease->state != NVS_LEASE_ENDING)
        return 0;
    lease->state = NVS_LEASE_NONE;
    lease->wanted = event->flag;
    lease->released_id = lease->lease_id;
    lease->lease_id = 0;
    lease->waiters = 0;
    lease->paced = false;
    if (!lease->attached)
        return 0; /* the connection took the lease with it */
    lease->release_wanted = lease->wanted;
    if (lease->wanted)
        lease->state = NVS_LEASE_ASKED;
    return NVS_LEASE_DO_RELEASE;
}

static uint32_t on_yield(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state != NVS_LEASE_HELD || lease->waiters == 0)
        return 0;
    return begin_end(lease, NVS_RELEASE_REASON_IDLE, true, later(event->now_ns, NVS_LEASE_DRAIN_NS));
}

static uint32_t on_not_managed(nvs_lease *lease)
{
    lease->state = NVS_LEASE_UNMANAGED;
    lease->lease_id = 0;
    lease->waiters = 0;
    return open_gate(lease);
}

uint32_t nvs_lease_handle(nvs_lease *lease, const nvs_lease_event *event)
{
    if (lease->state == NVS_LEASE_UNMANAGED && event->kind != NVS_LEASE_ON_CONNECTED &&
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
    case NVS_LEASE_ON_NOT_MANAGED: return on_not_managed(lease);
    }
    return 0;
}

void nvs_lease_init(nvs_lease *lease, bool run_on_loss, uint64_t loss_timeout_ns)
{
    memset(lease, 0, sizeof *lease);
    lease->run_on_loss = run_on_loss;
    lease->loss_timeout_ns = loss_timeout_ns;
}

uint32_t nvs_lease_use(nvs_lease *lease, uint64_t now_ns)
{
    if (lease->used)
        return 0;
    lease->used = true;
    if (lease->connected)
        return attach(lease);
    if (!lease->watch_loss) {
        lease->watch_loss = true;
        lease->lost_since_ns = now_ns;
    }
    return 0;
}

uint64_t nvs_lease_next_tick(const nvs_lease *lease, uint64_t now_ns)
{
    if (lease->state == NVS_LEASE_HELD && lease->waiters > 0 && lease->idle_release_ns != 0) {
        uint64_t step = lease->idle_release_ns / 2;
        return later(now_ns, step < LONGEST_TICK_NS ? step : LONGEST_TICK_NS);
    }
    if (!lease->connected && lease->watch_loss && lease->run_on_loss && lease->wanted && !nvs_lease_open(lease) &&
        lease->state != NVS_LEASE_ENDING && lease->state != NVS_LEASE_FREE_ENDING)
        return later(lease->lost_since_ns, lease->loss_timeout_ns);
    return UINT64_MAX;
}

bool nvs_lease_open(const nvs_lease *lease)
{
    return lease->state == NVS_LEASE_HELD || lease->state == NVS_LEASE_FREE || lease->state == NVS_LEASE_UNMANAGED;
}
