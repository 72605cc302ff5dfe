/* See lease.h.
 *
 * Reports of progress: the agent looks at the counts every 100 ms while the lease is held, and reports them if they have changed.  Without a change it
 * looks less and less often, so that an idle program sleeps.  Counting costs the application's threads nothing: the gate counts anyway.
 *
 * While the coordinator wants it, the agent also samples every millisecond whether the GPU has unfinished work of this process.  The sample stands
 * for the time since the one before; samples after a longer pause, or during a capture, do not count.
 *
 * Linked GPUs (gate/gate.h) have a lease each, and one turn: a thread that waits for one makes the agent ask for all, their gates open together, and when
 * one lease has been given back the others follow.  No gate of them is open meanwhile, so that memory of each may move.
 */
#include "coord/lease.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "coord/mailbox.h"
#include "coord/mover.h"
#include "coord/protocol/link.h"
#include "coord/protocol/wire.gen.h"
#include "coord/state.h"
#include "gate/gate.h"
#include "gate/host_functions.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "nvshare.h"
#include "swap/swap.h"

#include <string.h>

/* --- progress --- */

#define REPORT_NS 100000000u
#define LONGEST_PAUSE_NS 1600000000u /* between two looks without a change */
#define SAMPLE_NS 1000000u
#define STALE_NS 4000000u      /* an interval that is longer is not the sample's */

static struct progress {
    bool report, watch; /* the coordinator wants that */
    uint64_t lease_id;  /* the lease of the looks; 0: none */
    uint64_t look_at_ns;
    uint64_t pause_ns;  /* between two looks */
    nvs_progress sent;  /* the last report */
    uint64_t busy_ns, watched_ns;
    uint64_t sampled_ns; /* the last sample; 0: none on this lease */
} all[NVS_MAX_GPUS];

void nvs_progress_start(void)
{
    memset(all, 0, sizeof all);
}

void nvs_progress_want(uint32_t gpu, bool wants_reports, bool watch)
{
    all[gpu].report = wants_reports;
    all[gpu].watch = watch;
}

/* False: nothing has changed since the last report. */
static bool report(uint32_t gpu, uint64_t lease_id)
{
    nvs_progress *sent = &all[gpu].sent;
    const uint64_t work = nvs_gate_calls(gpu);
    const uint64_t steps = atomic_load_explicit(&nvs_steps, memory_order_relaxed); /* a count */
    if (work == sent->work && steps == sent->steps && all[gpu].busy_ns == sent->busy_ns)
        return false;
    *sent = (nvs_progress){.gpu = (uint8_t)gpu, .lease_id = lease_id, .at_ns = nvs_now_ns(), .work = work, .busy_ns = all[gpu].busy_ns,
                           .watched_ns = all[gpu].watched_ns, .steps = steps};
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    nvs_link_send(frame, nvs_encode_progress(sent, frame, sizeof frame));
    return true;
}

static void progress_before_release(uint32_t gpu, uint64_t lease_id)
{
    if (all[gpu].report)
        (void)report(gpu, lease_id);
}

/* Returns when the next sample is due. */
static uint64_t sample(uint32_t gpu, uint64_t now)
{
    struct progress *its = &all[gpu];
    const uint64_t since_ns = now - its->sampled_ns;
    bool busy = false;
    if (its->sampled_ns != 0 && since_ns < SAMPLE_NS)
        return its->sampled_ns + SAMPLE_NS;
    if (nvs_gpu_sample(gpu, &busy) && since_ns < STALE_NS) {
        its->watched_ns += since_ns;
        its->busy_ns += busy ? since_ns : 0;
    }
    its->sampled_ns = now;
    return now + SAMPLE_NS;
}

uint64_t nvs_progress_serve(uint32_t gpu, uint64_t lease_id, uint64_t now)
{
    struct progress *its = &all[gpu];
    if (!its->report || lease_id == 0) {
        its->lease_id = its->sampled_ns = 0;
        return UINT64_MAX;
    }
    if (its->lease_id != lease_id) {
        its->lease_id = lease_id;
        its->pause_ns = REPORT_NS;
        its->look_at_ns = now + REPORT_NS;
        its->sampled_ns = 0;
    } else if (now >= its->look_at_ns) {
        if (report(gpu, its->lease_id))
            its->pause_ns = REPORT_NS;
        else
            its->pause_ns = its->pause_ns < LONGEST_PAUSE_NS / 2 ? 2 * its->pause_ns : LONGEST_PAUSE_NS;
        its->look_at_ns = now + its->pause_ns;
    }
    if (!its->watch)
        return its->look_at_ns;
    const uint64_t sample_at = sample(gpu, now);
    return sample_at < its->look_at_ns ? sample_at : its->look_at_ns;
}

/* --- the lease --- */

#define SLICE_NS 5000000u /* of a drain */
#define HOST_FUNCTION_NS 100000000u /* for work that may wait for a host function */
#define COLLECTIVE_NS 10000000u     /* for work that may wait for a call before a closed gate */
#define LET_IN_NS 300000u
#define RATED_BUDGET_NS 2000000u /* most work in flight at a limited rate, so that drains are short */

#define EACH_LINKED(each, gpu)                                                                                                   \
    for (uint32_t each = 0, all_of_##each = nvs_gate_linked_with(gpu); each < NVS_MAX_GPUS; each++)                              \
        if ((all_of_##each >> each & 1) != 0)

nvs_agent_gpu nvs_agent_gpus[NVS_MAX_GPUS];

/* The next State says that the GPU is linked; it comes soon. */
static void report_link(uint32_t gpu)
{
    atomic_store_explicit(&nvs_ledgers[gpu].to_report, 1, memory_order_seq_cst); /* as nvs_agent_memory_changed */
}

static void send_attach(uint32_t gpu)
{
    const nvs_lease *lease = &nvs_agent_gpus[gpu].lease;
    nvs_usage usage;
    nvs_attach_gpu message = {.gpu = (uint8_t)gpu};
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    nvs_memory_usage(gpu, &usage);
    memcpy(message.uuid, nvs_mail[gpu].facts.uuid, sizeof message.uuid);
    message.lease_id = lease->grant.id;
    message.wanted = lease->wanted;
    message.allocated_bytes = usage.allocated_bytes;
    message.resident_bytes = usage.resident_bytes;
    message.pinned_bytes = usage.pinned_bytes;
    if (nvs_gate_linked_with(gpu) != UINT32_C(1) << gpu)
        report_link(gpu);
    message.parked = atomic_load_explicit(&nvs_hot.parked, memory_order_relaxed) != 0; /* written by this thread (parking.c) */
    nvs_agent_gpus[gpu].settled = false;
    nvs_link_send(frame, nvs_encode_attach_gpu(&message, frame, sizeof frame));
    nvs_state_attached(gpu);
}

static void show(uint32_t gpu)
{
    static const uint8_t shown[] = {
        [NVS_LEASE_NONE] = NVSHARE_LEASE_NONE,      [NVS_LEASE_ASKED] = NVSHARE_LEASE_WAITING,
        [NVS_LEASE_HELD] = NVSHARE_LEASE_HELD,      [NVS_LEASE_ENDING] = NVSHARE_LEASE_RETURNING,
        [NVS_LEASE_FREE] = NVSHARE_LEASE_FREE,      [NVS_LEASE_FREE_ENDING] = NVSHARE_LEASE_RETURNING,
        [NVS_LEASE_UNMANAGED] = NVSHARE_LEASE_UNMANAGED, [NVS_LEASE_FORBIDDEN] = NVSHARE_LEASE_NONE,
    };
    const nvs_lease *lease = &nvs_agent_gpus[gpu].lease;
    atomic_store_explicit(&nvs_mail[gpu].shown_state, shown[lease->state], memory_order_relaxed);
    atomic_store_explicit(&nvs_mail[gpu].shown_waiters, lease->grant.waiters, memory_order_relaxed);
    atomic_store_explicit(&nvs_mail[gpu].shown_lease, lease->grant.id, memory_order_relaxed);
}

static void release(uint32_t gpu, bool drained)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    uint64_t now = nvs_now_ns();
    if (nvs_state_due(gpu) != UINT64_MAX)
        nvs_state_send(gpu);
    progress_before_release(gpu, mine->lease.release.id);
    NVS_LINK_SEND(release, .gpu = (uint8_t)gpu, .lease_id = mine->lease.release.id, .reason = mine->lease.release.reason,
                  .drained = drained, .wanted = mine->lease.release.wanted, .drain_ns = now - mine->closing.began_ns,
                  .opened_at_ns = mine->lease.grant.opened_at_ns, .submissions = nvs_gate_calls(gpu) - mine->counted.calls);
}

/* The mover has done what it could for the gate to open. */
static void restored(uint32_t gpu)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    const nvs_mover_state *its = nvs_mover_state_of(gpu);
    if (its->error != 0 || its->in_bytes == mine->opening.in_bytes)
        mine->opening.tries = UINT32_MAX / 2; /* no immediate try */
    if (its->error == CUDA_ERROR_NOT_READY)
        nvs_swap_unite_refuse(gpu, CUDA_ERROR_NOT_READY); /* the program's work does not end, and may wait for the gate */
    mine->opening.aimed = false;
}

/* Whether the gates of the GPUs linked with this one may open as far as their leases and moves go. */
static bool others_may_open(uint32_t gpu)
{
    EACH_LINKED(other, gpu) {
        const nvs_agent_gpu *its = &nvs_agent_gpus[other];
        if (other != gpu && (!nvs_lease_open(&its->lease) || nvs_mover_state_of(other)->busy || its->duty.phase == NVS_DUTY_CLOSING ||
                             its->duty.phase == NVS_DUTY_CLOSED))
            return false;
    }
    return true;
}

static void opened(uint32_t gpu, uint64_t since_ns)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    mine->opening.pending = mine->opening.restoring = mine->opening.incomplete = mine->opening.aimed = false;
    mine->opening.patience_ns = 0;
    if (mine->lease.state == NVS_LEASE_HELD)
        nvs_duty_opened(&mine->duty, since_ns);
}

/* Opens the gate, after moves have ended and missing memory is restored; nvs_agent_continue_open continues it. */
static void open_gate(uint32_t gpu)
{
    enum { TRIES = 3 }; /* other threads of the program may allocate memory meanwhile */
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    const uint32_t gpus = others_may_open(gpu) ? nvs_gate_linked_with(gpu) : 0;
    uint32_t paced = 0;
    uint64_t missing = 0;
    EACH_LINKED(each, gpu)
        paced |= (uint32_t)nvs_agent_gpus[each].lease.paced << each;
    mine->opening.pending = mine->opening.restoring = true;
    mine->opening.incomplete = false;
    mine->opening.since_ns = nvs_now_ns();
    if (nvs_mover_state_of(gpu)->busy) {
        nvs_mover_hurry(gpu);
    } else if (nvs_memory_open_gates(gpu, gpus, paced, &missing)) {
        EACH_LINKED(each, gpu)
            opened(each, mine->opening.since_ns);
    } else if (missing == 0) {
        mine->opening.incomplete = true;
    } else if (mine->opening.tries++ < TRIES) {
        mine->opening.aimed = true;
        mine->opening.in_bytes = nvs_mover_state_of(gpu)->in_bytes;
        nvs_mover_aim(gpu, &(nvs_goal){.bytes = nvs_memory_resident(gpu) + missing});
    } else {
        mine->opening.restoring = false;
    }
}

static void open_again(uint32_t gpu)
{
    nvs_agent_gpus[gpu].opening.tries = 0;
    open_gate(gpu);
}

void nvs_agent_close_and_open(uint32_t gpu)
{
    const nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (!nvs_lease_open(&mine->lease) || mine->opening.pending)
        return; /* the gate is closed, and will be opened in the same way */
    (void)nvs_gate_close(gpu, 0);
    open_again(gpu);
}

void nvs_agent_link_gpus(uint32_t gpus)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((gpus >> gpu & 1) != 0)
            (void)nvs_gate_close(gpu, 0);
    atomic_store_explicit(&nvs_gate_links, gpus, memory_order_release); /* pairs with nvs_agent_link and nvs_gate_linked_with */
    nvs_futex_wake(&nvs_gate_links, INT32_MAX);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        if ((gpus >> gpu & 1) == 0)
            continue;
        report_link(gpu);
        if (nvs_lease_open(&nvs_agent_gpus[gpu].lease))
            open_again(gpu);
    }
    nvs_log(NVS_LOG_INFO, "GPUs of this program reach each other (mask %x): they have one turn from now on", gpus);
}

static uint64_t calls_of(uint32_t gpu)
{
    uint64_t calls = 0;
    EACH_LINKED(each, gpu)
        calls += nvs_gate_calls(each);
    return calls;
}

bool nvs_agent_wanted(uint32_t gpu)
{
    bool any = false;
    EACH_LINKED(each, gpu)
        any = any || nvs_gate_waiting(each) > 0;
    return any;
}

/* Ends a lease as if the coordinator had revoked it.  False: there is none, or nobody to take it. */
static bool give_back(uint32_t gpu)
{
    const nvs_lease *its = &nvs_agent_gpus[gpu].lease;
    if (its->state != NVS_LEASE_HELD || !its->link.connected)
        return false;
    nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_REVOKE, .lease_id = its->grant.id, .number = NVS_LEASE_DRAIN_NS});
    return true;
}

void nvs_agent_tick(uint32_t gpu)
{
    bool in_use = false;
    EACH_LINKED(each, gpu)
        in_use = in_use || nvs_gate_in_use(each) || nvs_mover_state_of(each)->busy;
    nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_TICK, .number = calls_of(gpu), .flag = in_use});
    if (nvs_gate_dead(gpu) && nvs_gate_linked_with(gpu) == UINT32_C(1) << gpu)
        (void)give_back(gpu); /* calls need none */
}

/* The lease has been given back: so are those of linked GPUs, whose gates are closed. */
static void end_linked(uint32_t gpu)
{
    EACH_LINKED(each, gpu)
        if (each != gpu)
            (void)give_back(each);
}

void nvs_agent_carry_out(uint32_t gpu, uint32_t todo, bool drained)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    show(gpu); /* before the gate opens: a thread that has passed it reads the new state from nvshare_gpu_state */
    if (mine->lease.state != NVS_LEASE_HELD)
        nvs_duty_stop(&mine->duty);
    if (todo & NVS_LEASE_DO_CLOSE) {
        mine->closing.closed = false;
        mine->closing.began_ns = mine->closing.since_ns = nvs_now_ns();
        mine->closing.patience_ns = COLLECTIVE_NS;
        mine->closing.calls = calls_of(gpu);
    }
    if (todo & NVS_LEASE_DO_RELEASE) {
        release(gpu, drained);
        end_linked(gpu);
    }
    if (todo & NVS_LEASE_DO_ATTACH)
        send_attach(gpu);
    if ((todo & NVS_LEASE_DO_REQUEST) && nvs_state_due(gpu) != UINT64_MAX)
        nvs_state_send(gpu); /* so that the coordinator makes room for memory that was allocated without a lease */
    if (todo & NVS_LEASE_DO_REQUEST)
        NVS_LINK_SEND(request, (uint8_t)gpu);
    if (todo & NVS_LEASE_DO_OPEN) {
        if (mine->counted.lease_id != mine->lease.grant.id) /* else the same lease is opened again, or confirmed */
            mine->counted.calls = nvs_gate_calls(gpu);
        mine->counted.lease_id = mine->lease.grant.id;
        open_again(gpu);
    }
    if (todo & NVS_LEASE_DO_WARN)
        NVS_LOG_ONCE(NVS_LOG_WARNING,
                     "no coordinator at %s for too long; running without a lease (NVSHARE_ON_LOSS=run)",
                     nvs_config.socket);
}

void nvs_agent_event(uint32_t gpu, const nvs_lease_event *event)
{
    nvs_lease_event at = *event;
    at.now_ns = nvs_now_ns();
    nvs_agent_carry_out(gpu, nvs_lease_handle(&nvs_agent_gpus[gpu].lease, &at), true);
}

/* A lease with a limited rate is always paced. */
static void pace(uint32_t gpu, uint64_t idle_release_ns)
{
    const nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    const uint64_t budget = mine->pacing_budget_ns, most = mine->duty.rate < NVS_DUTY_ALWAYS ? RATED_BUDGET_NS : 0;
    nvs_pacing_set_budget(gpu, budget, most);
    nvs_agent_event(gpu, &(nvs_lease_event){
                    .kind = NVS_LEASE_ON_SETTINGS, .number = budget != 0 ? budget : most, .other = idle_release_ns});
}

void nvs_agent_set_pacing(uint32_t gpu, uint64_t budget_ns, uint64_t idle_release_ns)
{
    nvs_agent_gpus[gpu].pacing_budget_ns = budget_ns;
    pace(gpu, idle_release_ns);
}

void nvs_agent_set_rate(uint32_t gpu, uint32_t rate)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    const uint16_t before = mine->duty.rate;
    nvs_duty_set_rate(&mine->duty, rate, nvs_now_ns());
    if (mine->duty.rate == before)
        return;
    if (before == NVS_DUTY_ALWAYS || mine->duty.rate == NVS_DUTY_ALWAYS)
        pace(gpu, mine->lease.settings.idle_release_ns);
    if (mine->duty.phase == NVS_DUTY_OFF && mine->lease.state == NVS_LEASE_HELD && !mine->opening.pending)
        open_again(gpu); /* the cycle begins, or ends with an open gate */
}

uint64_t nvs_agent_hold_rate(uint32_t gpu)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    nvs_duty *duty = &mine->duty;
    const uint64_t now = nvs_now_ns(), slice = now + SLICE_NS;
    if (duty->phase == NVS_DUTY_OFF || mine->opening.pending)
        return UINT64_MAX;
    if (now < duty->until_ns)
        return duty->until_ns;
    if (duty->phase == NVS_DUTY_OPEN && !nvs_duty_begin_close(duty, now, nvs_gate_calls(gpu), nvs_gate_inside(gpu)))
        return duty->until_ns;
    if (duty->phase == NVS_DUTY_CLOSED) {
        open_again(gpu);
    } else if (nvs_gate_close(gpu, slice) == NVS_OK && nvs_drain_closed(gpu, slice) == NVS_OK) {
        nvs_duty_drained(duty, nvs_now_ns(), nvs_gate_calls(gpu));
    } else if (!nvs_duty_wait_on(duty, nvs_now_ns())) {
        open_again(gpu);
    }
    return mine->opening.pending ? UINT64_MAX : duty->until_ns;
}

bool nvs_agent_ending(const nvs_agent_gpu *mine)
{
    return mine->lease.state == NVS_LEASE_ENDING || mine->lease.state == NVS_LEASE_FREE_ENDING;
}

/* Work on one of several linked GPUs may wait for work on another one, whose call has come to the closed gate: the kernels of a collective do.  All leases
 * are still held, so calls are let in for a moment, after growing pauses. */
static void let_in(uint32_t gpu, uint64_t now)
{
    uint32_t paced = 0;
    uint64_t missing;
    if (nvs_gate_linked_with(gpu) == UINT32_C(1) << gpu || now < nvs_agent_gpus[gpu].closing.since_ns + nvs_agent_gpus[gpu].closing.patience_ns ||
        !nvs_agent_wanted(gpu))
        return;
    EACH_LINKED(each, gpu) {
        const nvs_agent_gpu *its = &nvs_agent_gpus[each];
        if (!nvs_lease_open(&its->lease) && !nvs_agent_ending(its))
            return;
        paced |= (uint32_t)its->lease.paced << each;
    }
    if (nvs_memory_open_gates(gpu, nvs_gate_linked_with(gpu), paced, &missing))
        nvs_nap(LET_IN_NS);
    EACH_LINKED(each, gpu) {
        nvs_agent_gpus[each].closing.closed = false;
        nvs_agent_gpus[each].closing.since_ns = nvs_now_ns();
        nvs_agent_gpus[each].closing.patience_ns *= 2; /* they bring more work, which has to end too */
    }
}

/* One slice of closing and draining. */
void nvs_agent_continue_end(uint32_t gpu)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    uint64_t now = nvs_now_ns(), end = mine->lease.end.deadline_ns;
    if (mine->closing.closed && nvs_host_functions_run(gpu) && end > mine->closing.began_ns + HOST_FUNCTION_NS)
        end = mine->closing.began_ns + HOST_FUNCTION_NS;
    uint64_t slice = end < now + SLICE_NS ? end : now + SLICE_NS;
    bool overdue;
    if (nvs_mover_state_of(gpu)->busy) { /* the gate is still closed: the lease was granted while memory moved, or memory is restored for it */
        if (mine->opening.aimed)
            nvs_mover_hold(gpu);
        return;
    }
    mine->opening.aimed = false;
    if (!mine->closing.closed) {
        mine->closing.closed = nvs_gate_close(gpu, slice) == NVS_OK;
        if (mine->closing.closed && mine->lease.state == NVS_LEASE_ENDING && !mine->lease.end.revoked &&
            (calls_of(gpu) != mine->closing.calls || !nvs_gpu_idle(gpu))) {
            nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_BUSY});
            return;
        }
    }
    overdue = !mine->closing.closed || nvs_drain_closed(gpu, slice) != NVS_OK;
    now = nvs_now_ns();
    if (overdue && now < end) {
        let_in(gpu, now);
        return;
    }
    if (overdue)
        NVS_LOG_ONCE(NVS_LOG_WARNING,
                     "work on GPU %u did not end within %llu ms after the lease was revoked; "
                     "the lease is released while it runs",
                     gpu, (unsigned long long)((now - mine->closing.began_ns) / 1000000));
    nvs_lease_event event = {.kind = NVS_LEASE_ON_DRAINED, .now_ns = now, .flag = nvs_agent_wanted(gpu)};
    nvs_agent_carry_out(gpu, nvs_lease_handle(&mine->lease, &event), !overdue);
}

/* Memory is missing on the GPU, so the gate stays closed.  Only the coordinator can make room, so the lease is released and requested again: at once
 * the first time, then after growing pauses.  Without a coordinator the agent tries again. */
void nvs_agent_continue_open(uint32_t gpu, uint64_t now)
{
    enum { FIRST_NS = 2000000, LONGEST_NS = 200000000 };
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (!nvs_lease_open(&mine->lease)) {
        mine->opening.pending = mine->opening.restoring = mine->opening.incomplete = false;
        return;
    }
    if (mine->opening.incomplete && !others_may_open(gpu))
        return;
    if (mine->opening.restoring) {
        if (nvs_mover_state_of(gpu)->busy)
            return;
        if (mine->opening.aimed)
            restored(gpu);
        open_gate(gpu);
        return;
    }
    if (now < mine->opening.since_ns + mine->opening.patience_ns)
        return;
    if (mine->opening.patience_ns != 0)
        NVS_LOG_ONCE(NVS_LOG_WARNING,
                     "GPU %u has no room for this program's memory; waiting until others have made it (if there are none, the driver needs more "
                     "memory than the coordinator leaves it: lower `capacity`)", gpu);
    if (mine->opening.patience_ns == 0)
        mine->opening.patience_ns = FIRST_NS;
    else
        mine->opening.patience_ns = mine->opening.patience_ns < LONGEST_NS / 2 ? 2 * mine->opening.patience_ns : LONGEST_NS;
    if (give_back(gpu))
        mine->opening.pending = false;
    else
        open_again(gpu);
}
