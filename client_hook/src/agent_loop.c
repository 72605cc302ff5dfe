/* The agent thread: joins transport, lease, gate, memory and pacing.
 *
 * It sleeps in ppoll() on the eventfd of the application's threads and the connection, with a time-out only while
 * something is due: a drain, the detection of idleness while somebody waits for our lease, a memory report, a new
 * connection.  The mailboxes are levels, not edges: each round looks at all of them, so a poke may be lost in another.
 *
 * A drain is done in slices, so that the other GPUs of the process, the connection and exit() are served meanwhile.
 *
 * May not go here: functions that an application's thread calls.
 */
#define _GNU_SOURCE /* ppoll */
#include "agent_link.h"
#include "agent_moves.h"
#include "agent_state.h"
#include "gate.h"
#include "lease.h"
#include "log.h"
#include "memory.h"
#include "nvshare.h"
#include "pacing.h"
#include "transport.h"
#include "wire.gen.h"

#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define SLICE_NS 5000000u           /* of a drain */
#define REPORT_NS 10000000u         /* at most one memory report in that time, but always one before a release */
#define SAY_AGAIN_NS 60000000000u
#define COMPLAIN_NS 3000000000u     /* without a coordinator, with threads waiting for one */
#define NAP_NS 25000u               /* on standby */
#define LONGEST_STANDBY_NS 20000000u

typedef struct nvs_agent_gpu {
    nvs_lease lease;
    bool known;               /* the application uses it, and its UUID is known */
    bool closed;              /* of the end of the present lease: the gate is closed and nobody inside */
    uint64_t close_began_ns;
    uint64_t counted_lease;   /* the lease that calls_at_open is for */
    uint64_t calls_at_open;
    uint64_t calls_at_close;
    uint64_t tick_at_ns;
    uint64_t reported_ns;
    bool incomplete;          /* the gate is shut though it might be open: memory is missing on the GPU */
    uint64_t incomplete_ns;   /* since when */
    uint64_t patience_ns;     /* before the next try */
    uint32_t reserve_sent;    /* number of the question sent on this connection */
} nvs_agent_gpu;

static nvs_agent_gpu gpus[NVS_MAX_GPUS];

static uint64_t awake_until_ns; /* on standby: nap instead of sleeping, so that the grant finds a processor awake */
static uint8_t unanswered[NVS_MAX_GPUS]; /* ordinals attached on this connection and not answered, oldest first */
static uint32_t unanswered_count;

/* --- a lease --- */

static void send_attach(uint32_t gpu)
{
    const nvs_lease *lease = &gpus[gpu].lease;
    nvs_usage usage;
    nvs_attach_gpu message = {.gpu = (uint8_t)gpu, .total_bytes = nvs_mail[gpu].facts.total_bytes};
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    nvs_memory_usage(gpu, &usage);
    memcpy(message.uuid, nvs_mail[gpu].facts.uuid, sizeof message.uuid);
    message.lease_id = lease->lease_id;
    message.wanted = lease->wanted;
    message.allocated_bytes = usage.allocated_bytes;
    message.resident_bytes = usage.resident_bytes;
    message.pinned_bytes = usage.pinned_bytes;
    if (unanswered_count < NVS_MAX_GPUS)
        unanswered[unanswered_count++] = (uint8_t)gpu;
    gpus[gpu].reserve_sent = 0;
    nvs_link_send(frame, nvs_encode_attach_gpu(&message, frame, sizeof frame));
}

static void report_memory(uint32_t gpu, uint64_t now_ns)
{
    nvs_usage usage;
    /* seq_cst: the flag goes before the figures are read, see nvs_agent_memory_changed */
    (void)atomic_exchange_explicit(&nvs_mail[gpu].memory_changed, 0, memory_order_seq_cst);
    nvs_memory_usage(gpu, &usage);
    gpus[gpu].reported_ns = now_ns;
    NVS_LINK_SEND(memory_report, (uint8_t)gpu, usage.allocated_bytes, usage.resident_bytes, usage.pinned_bytes,
                  usage.host_bytes);
}

static bool memory_changed(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_mail[gpu].memory_changed, memory_order_relaxed) != 0;
}

static void show(uint32_t gpu)
{
    static const uint8_t shown[] = {
        [NVS_LEASE_NONE] = NVSHARE_LEASE_NONE,      [NVS_LEASE_ASKED] = NVSHARE_LEASE_WAITING,
        [NVS_LEASE_HELD] = NVSHARE_LEASE_HELD,      [NVS_LEASE_ENDING] = NVSHARE_LEASE_RETURNING,
        [NVS_LEASE_FREE] = NVSHARE_LEASE_FREE,      [NVS_LEASE_FREE_ENDING] = NVSHARE_LEASE_RETURNING,
        [NVS_LEASE_UNMANAGED] = NVSHARE_LEASE_UNMANAGED,
    };
    const nvs_lease *lease = &gpus[gpu].lease;
    atomic_store_explicit(&nvs_mail[gpu].shown_state, shown[lease->state], memory_order_relaxed);
    atomic_store_explicit(&nvs_mail[gpu].shown_waiters, lease->waiters, memory_order_relaxed);
    atomic_store_explicit(&nvs_mail[gpu].shown_lease, lease->lease_id, memory_order_relaxed);
}

static void settle(uint32_t gpu)
{
    atomic_store_explicit(&nvs_mail[gpu].settled, 1, memory_order_release); /* pairs with nvs_agent_attach */
    nvs_futex_wake(&nvs_mail[gpu].settled, INT32_MAX);
}

static void release(uint32_t gpu, bool drained)
{
    nvs_agent_gpu *mine = &gpus[gpu];
    uint64_t now = nvs_now_ns();
    if (memory_changed(gpu))
        report_memory(gpu, now);
    NVS_LINK_SEND(release, .gpu = (uint8_t)gpu, .lease_id = mine->lease.released_id, .reason = mine->lease.reason,
                  .drained = drained, .wanted = mine->lease.release_wanted, .drain_ns = now - mine->close_began_ns,
                  .opened_at_ns = mine->lease.opened_at_ns, .submissions = nvs_gate_calls(gpu) - mine->calls_at_open);
}

static void carry_out(uint32_t gpu, uint32_t todo, bool drained)
{
    nvs_agent_gpu *mine = &gpus[gpu];
    show(gpu); /* before the gate opens: who has passed it is told of the lease */
    if (todo & NVS_LEASE_DO_CLOSE) {
        mine->closed = false;
        mine->close_began_ns = nvs_now_ns();
        mine->calls_at_close = nvs_gate_calls(gpu);
    }
    if (todo & NVS_LEASE_DO_RELEASE)
        release(gpu, drained);
    if (todo & NVS_LEASE_DO_ATTACH)
        send_attach(gpu);
    if ((todo & NVS_LEASE_DO_REQUEST) && memory_changed(gpu))
        report_memory(gpu, nvs_now_ns()); /* so that room is made for what was allocated without a lease */
    if (todo & NVS_LEASE_DO_REQUEST)
        NVS_LINK_SEND(request, (uint8_t)gpu);
    if (todo & NVS_LEASE_DO_OPEN) {
        if (mine->counted_lease != mine->lease.lease_id) /* not merely opened again or confirmed */
            mine->calls_at_open = nvs_gate_calls(gpu);
        mine->counted_lease = mine->lease.lease_id;
        mine->incomplete = !nvs_memory_open_gate(gpu, mine->lease.paced);
        mine->incomplete_ns = nvs_now_ns();
        if (!mine->incomplete)
            mine->patience_ns = 0;
    }
    if (todo & NVS_LEASE_DO_WARN)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "no coordinator at %s for too long; running without a lease (NVSHARE_ON_LOSS=run)",
                     nvs_config.socket);
}

static void happen(uint32_t gpu, const nvs_lease_event *event)
{
    nvs_lease_event at = *event;
    at.now_ns = nvs_now_ns();
    carry_out(gpu, nvs_lease_handle(&gpus[gpu].lease, &at), true);
}

static bool ending(const nvs_agent_gpu *mine)
{
    return mine->lease.state == NVS_LEASE_ENDING || mine->lease.state == NVS_LEASE_FREE_ENDING;
}

/* One slice of closing and draining. */
static void go_on_ending(uint32_t gpu)
{
    nvs_agent_gpu *mine = &gpus[gpu];
    uint64_t now = nvs_now_ns(), end = mine->lease.end_by_ns;
    uint64_t slice = end < now + SLICE_NS ? end : now + SLICE_NS;
    bool overdue;
    if (!mine->closed) {
        mine->closed = nvs_gate_close(gpu, slice) == NVS_OK;
        if (mine->closed && mine->lease.state == NVS_LEASE_ENDING && !mine->lease.revoked &&
            (nvs_gate_calls(gpu) != mine->calls_at_close || !nvs_gpu_idle(gpu))) {
            happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_BUSY});
            return;
        }
    }
    overdue = !mine->closed || nvs_drain(gpu, slice) != NVS_OK;
    now = nvs_now_ns();
    if (overdue && now < end)
        return;
    if (overdue)
        NVS_LOG_ONCE(NVS_LOG_WARNING,
                     "work on GPU %u did not end within %llu ms after the lease was revoked; the lease goes back while it runs",
                     gpu, (unsigned long long)((now - mine->close_began_ns) / 1000000));
    nvs_lease_event event = {.kind = NVS_LEASE_ON_DRAINED, .now_ns = now, .flag = nvs_gate_waiting(gpu) > 0};
    carry_out(gpu, nvs_lease_handle(&mine->lease, &event), !overdue);
}

/* --- memory that moves --- */

static void move_memory(uint32_t gpu, uint64_t order_id, uint64_t bytes, bool out)
{
    nvs_moved moved = {.error = CUDA_ERROR_NOT_PERMITTED}; /* only what nobody uses may move */
    if (!nvs_lease_open(&gpus[gpu].lease) && !ending(&gpus[gpu]))
        moved = nvs_agent_move(gpu, order_id, bytes, out);
    report_memory(gpu, nvs_now_ns());
    NVS_LINK_SEND(move_progress, (uint8_t)gpu, order_id, moved.bytes, moved.elapsed_ns, true, moved.error);
}

/* --- the connection --- */

static void on_lost(void)
{
    atomic_store_explicit(&nvs_agent_connected, 0, memory_order_relaxed); /* a hint for those who wait */
    unanswered_count = 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_DISCONNECTED});
}

static void on_connected(void)
{
    unanswered_count = 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_CONNECTED});
}

static void answered(uint32_t gpu)
{
    for (uint32_t i = 0; i < unanswered_count; i++) {
        if (unanswered[i] != gpu)
            continue;
        memmove(&unanswered[i], &unanswered[i + 1], unanswered_count - i - 1);
        unanswered_count--;
        return;
    }
}

static void on_rejected(const nvs_rejected *rejected)
{
    static uint64_t say_again_ns;
    uint64_t now = nvs_now_ns();
    if (rejected->code == NVS_REJECTION_UNKNOWN_GPU && unanswered_count > 0) {
        uint32_t gpu = unanswered[0]; /* the coordinator answers in order */
        answered(gpu);
        nvs_log(NVS_LOG_WARNING, "GPU %u is not shared: %s", gpu, rejected->text);
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_NOT_MANAGED});
        settle(gpu);
        return;
    }
    if (now >= say_again_ns || !rejected->final) {
        nvs_log(rejected->final ? NVS_LOG_WARNING : NVS_LOG_INFO, "the coordinator refuses (%u): %s", rejected->code,
                rejected->text);
        say_again_ns = rejected->final ? now + SAY_AGAIN_NS : say_again_ns;
    }
    if (rejected->final)
        nvs_link_refused();
}

static void on_settings(const nvs_gpu_settings *settings)
{
    uint32_t gpu = settings->gpu;
    answered(gpu);
    nvs_memory_set_limits(gpu, settings->memory_limit_bytes, settings->capacity_bytes, settings->reserve);
    nvs_pacing_set_budget(gpu, settings->pacing_budget_ns);
    nvs_memory_expect_eviction(gpu, settings->pacing_budget_ns != 0); /* which is so when others use the GPU too */
    happen(gpu, &(nvs_lease_event){
                    .kind = NVS_LEASE_ON_SETTINGS, .number = settings->pacing_budget_ns, .other = settings->idle_release_ns});
    settle(gpu);
}

static void on_reserved(const nvs_memory_reserved *answer)
{
    nvs_mailbox *mail = &nvs_mail[answer->gpu];
    nvs_memory_set_reserved(answer->gpu, answer->bytes);
    if (answer->sequence != gpus[answer->gpu].reserve_sent)
        return;
    atomic_store_explicit(&mail->reserved_bytes, answer->bytes, memory_order_relaxed); /* published by the next line */
    atomic_store_explicit(&mail->reserve_answered, answer->sequence, memory_order_release); /* pairs with ask() */
    nvs_futex_wake(&mail->reserve_answered, INT32_MAX);
}

static void on_standby(const nvs_standby *standby)
{
    uint64_t within = standby->within_ns < LONGEST_STANDBY_NS ? standby->within_ns : LONGEST_STANDBY_NS;
    awake_until_ns = nvs_now_ns() + within;
    if (gpus[standby->gpu].lease.state == NVS_LEASE_ASKED) /* else it is the end of our own turn that is near */
        nvs_gate_alert(standby->gpu, awake_until_ns);
}

static void on_frame(const uint8_t *frame, size_t size)
{
    nvs_to_client in;
    nvs_wire_result result = size > NVS_MAX_FRAME_BYTES ? NVS_WIRE_MALFORMED : nvs_decode_to_client(frame, size, &in);
    if (result == NVS_WIRE_UNKNOWN) {
        NVS_LOG_ONCE(NVS_LOG_INFO, "message of unknown type %u; the coordinator is newer", in.type);
        return;
    }
    uint32_t about = result == NVS_WIRE_OK ? nvs_to_client_gpu(&in) : UINT32_MAX;
    if (about != UINT32_MAX && (about >= NVS_MAX_GPUS || !gpus[about].known))
        result = NVS_WIRE_MALFORMED;
    if (result != NVS_WIRE_OK) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the coordinator sent something malformed; connecting again");
        nvs_link_fail();
        return;
    }
    nvs_lease_event event = {0};
    switch (in.type) {
    case NVS_TYPE_WELCOME:
        atomic_store_explicit(&nvs_agent_connected, 1, memory_order_relaxed); /* a hint for those who wait */
        nvs_log(NVS_LOG_INFO, "client %llu of %s", (unsigned long long)in.welcome.client_id, nvs_config.socket);
        return;
    case NVS_TYPE_REJECTED: on_rejected(&in.rejected); return;
    case NVS_TYPE_GPU_SETTINGS: on_settings(&in.gpu_settings); return;
    case NVS_TYPE_MEMORY_RESERVED: on_reserved(&in.memory_reserved); return;
    case NVS_TYPE_EVICT: move_memory(in.evict.gpu, in.evict.order_id, in.evict.bytes, true); return;
    case NVS_TYPE_RESTORE: move_memory(in.restore.gpu, in.restore.order_id, in.restore.bytes, false); return;
    case NVS_TYPE_GRANT:
        event = (nvs_lease_event){.kind = NVS_LEASE_ON_GRANT, .lease_id = in.grant.lease_id, .number = in.grant.waiters};
        awake_until_ns = 0;
        happen(in.grant.gpu, &event);
        return;
    case NVS_TYPE_STANDBY: on_standby(&in.standby); return;
    case NVS_TYPE_REVOKE:
        event = (nvs_lease_event){
            .kind = NVS_LEASE_ON_REVOKE, .lease_id = in.revoke.lease_id, .number = in.revoke.drain_deadline_ns};
        happen(in.revoke.gpu, &event);
        if (ending(&gpus[in.revoke.gpu]))
            go_on_ending(in.revoke.gpu);
        return;
    case NVS_TYPE_WAITERS:
        event = (nvs_lease_event){
            .kind = NVS_LEASE_ON_WAITERS, .lease_id = in.waiters.lease_id, .number = in.waiters.waiters};
        happen(in.waiters.gpu, &event);
        return;
    default: return;
    }
}

/* --- a round --- */

static bool becomes_known(uint32_t gpu)
{
    nvs_agent_gpu *mine = &gpus[gpu];
    if (mine->known)
        return true;
    /* acquire: pairs with the release in describe() */
    if (atomic_load_explicit(&nvs_mail[gpu].facts_state, memory_order_acquire) != NVS_FACTS_KNOWN)
        return false;
    mine->known = true;
    if (nvs_gate_waiting(gpu) > 0) /* so that AttachGpu carries the wish */
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    else
        carry_out(gpu, nvs_lease_use(&mine->lease, nvs_now_ns()), true);
    return true;
}

static void look_at_mailbox(uint32_t gpu, uint64_t now)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    nvs_agent_gpu *mine = &gpus[gpu];
    if (nvs_gate_waiting(gpu) > 0 && !mine->lease.wanted && !nvs_lease_open(&mine->lease) && !ending(mine))
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    if (atomic_load_explicit(&mail->yield, memory_order_relaxed) != 0 &&
        atomic_exchange_explicit(&mail->yield, 0, memory_order_seq_cst) != 0) /* pairs with nvshare_yield */
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_YIELD});
    if (mine->lease.attached) {
        uint32_t asked = atomic_load_explicit(&mail->reserve_asked, memory_order_acquire); /* pairs with ask() */
        if (asked != mine->reserve_sent) {
            mine->reserve_sent = asked;
            uint64_t bytes = atomic_load_explicit(&mail->reserve_bytes, memory_order_relaxed); /* the acquire above */
            NVS_LINK_SEND(reserve_memory, (uint8_t)gpu, asked, bytes);
        }
        if (memory_changed(gpu) && now >= mine->reported_ns + REPORT_NS)
            report_memory(gpu, now);
    }
}

static void tick(uint32_t gpu, uint64_t now)
{
    nvs_agent_gpu *mine = &gpus[gpu];
    uint64_t next = nvs_lease_next_tick(&mine->lease, now);
    if (next == UINT64_MAX) {
        mine->tick_at_ns = UINT64_MAX;
    } else if (mine->tick_at_ns == UINT64_MAX) {
        mine->tick_at_ns = next;
    } else if (now >= mine->tick_at_ns) {
        happen(gpu, &(nvs_lease_event){
                        .kind = NVS_LEASE_ON_TICK, .number = nvs_gate_calls(gpu), .flag = nvs_gate_inside(gpu)});
        next = nvs_lease_next_tick(&mine->lease, now);
        mine->tick_at_ns = next;
    }
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* Memory that should be on the GPU is not, so the gate stays shut: only the coordinator can make room, so the lease goes back to
 * be granted again, at once the first time and then less and less eagerly.  Without a coordinator only trying again is left. */
static void complete(uint32_t gpu, uint64_t now)
{
    enum { FIRST_NS = 2000000, LONGEST_NS = 200000000 };
    nvs_agent_gpu *mine = &gpus[gpu];
    if (!nvs_lease_open(&mine->lease)) {
        mine->incomplete = false;
        return;
    }
    if (now < mine->incomplete_ns + mine->patience_ns)
        return;
    if (mine->patience_ns != 0)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "GPU %u has no room for this program's memory; waiting until others have made it", gpu);
    mine->patience_ns = mine->patience_ns == 0 ? FIRST_NS : mine->patience_ns < LONGEST_NS / 2 ? 2 * mine->patience_ns : LONGEST_NS;
    if (mine->lease.state == NVS_LEASE_HELD && mine->lease.connected) {
        mine->incomplete = false;
        happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_REVOKE, .lease_id = mine->lease.lease_id, .number = NVS_LEASE_DRAIN_NS});
        return;
    }
    mine->incomplete = !nvs_memory_open_gate(gpu, mine->lease.paced);
    mine->incomplete_ns = now;
}

static uint64_t serve_gpus(void)
{
    uint64_t due = UINT64_MAX;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_agent_gpu *mine = &gpus[gpu];
        if (!becomes_known(gpu))
            continue;
        uint64_t now = nvs_now_ns();
        look_at_mailbox(gpu, now);
        if (mine->incomplete)
            complete(gpu, now);
        if (ending(mine))
            go_on_ending(gpu);
        tick(gpu, now); /* last: it arms itself again after an end that was called off */
        if (ending(mine))
            due = 0;
        due = earlier(due, mine->tick_at_ns);
        if (mine->incomplete)
            due = earlier(due, mine->incomplete_ns + mine->patience_ns);
        if (mine->lease.attached && memory_changed(gpu))
            due = earlier(due, mine->reported_ns + REPORT_NS);
    }
    return due;
}

/* Threads that wait for a coordinator who is not there look like a hang: say once what they wait for.  Returns when. */
static uint64_t complain(void)
{
    static uint64_t since_ns;
    static bool said;
    bool waiting = false;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && !said && !nvs_link_up(); gpu++)
        waiting = waiting || nvs_gate_waiting(gpu) > 0;
    if (!waiting) {
        since_ns = 0;
        return UINT64_MAX;
    }
    uint64_t now = nvs_now_ns();
    if (since_ns == 0)
        since_ns = now;
    if (now < since_ns + COMPLAIN_NS)
        return since_ns + COMPLAIN_NS;
    said = true;
    nvs_log(NVS_LOG_WARNING, "no coordinator answers at %s; waiting for it (start nvshare-coordinator, or unset "
            "NVSHARE_SOCKET to run without sharing)", nvs_config.socket);
    return UINT64_MAX;
}

static void sleep_until(uint64_t due)
{
    uint64_t now = nvs_now_ns();
    if (now < awake_until_ns)
        due = earlier(due, now + NAP_NS);
    struct pollfd watched[2] = {{.fd = nvs_agent_eventfd, .events = POLLIN}};
    watched[1].fd = nvs_link_descriptor(&watched[1].events); /* poll() passes over -1 */
    struct timespec wait = {0, 0};
    if (due != UINT64_MAX) {
        uint64_t left = due > now ? due - now : 0;
        wait.tv_sec = (time_t)(left / 1000000000u);
        wait.tv_nsec = (long)(left % 1000000000u);
    }
    (void)ppoll(watched, 2, due == UINT64_MAX ? NULL : &wait, NULL);
    if (watched[0].revents != 0) {
        uint64_t pokes;
        ssize_t taken = read(nvs_agent_eventfd, &pokes, sizeof pokes);
        (void)taken; /* empty: a round for nothing */
    }
    /* After the read and before the mailboxes are looked at: pairs with the exchange in nvs_agent_poke. */
    (void)atomic_exchange_explicit(&nvs_agent_poked, 0, memory_order_seq_cst);
}

/* exit() was called: what can be given back in order within its 50 ms is, and then nothing is called any more. */
static void depart(void)
{
    bool clean = true;
    uint64_t until = nvs_now_ns() + 20000000u;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_state state = gpus[gpu].lease.state;
        if (state != NVS_LEASE_HELD && state != NVS_LEASE_ENDING)
            continue;
        if (nvs_gate_close(gpu, until) != NVS_OK || nvs_drain(gpu, until) != NVS_OK)
            clean = false; /* the end of the process will tell the coordinator */
    }
    if (clean && nvs_link_up()) {
        uint8_t frame[8];
        nvs_goodbye message = {0};
        nvs_link_send(frame, nvs_encode_goodbye(&message, frame, sizeof frame));
        nvs_transport_finish(10);
    }
    atomic_store_explicit(&nvs_agent_departed, 1, memory_order_release); /* pairs with nvs_agent_goodbye */
    nvs_futex_wake(&nvs_agent_departed, INT32_MAX);
}

void *nvs_agent_main(void *nothing)
{
    static const nvs_link_handlers handlers = {on_connected, on_lost, on_frame};
    (void)prctl(PR_SET_NAME, "nvshare", 0, 0, 0);
    (void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    memset(gpus, 0, sizeof gpus); /* after a fork there is what the parent's agent left */
    unanswered_count = 0;
    awake_until_ns = 0;
    nvs_link_start();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_init(&gpus[gpu].lease, nvs_config.run_on_loss, nvs_config.loss_timeout_ns);
        gpus[gpu].tick_at_ns = UINT64_MAX;
    }
    /* acquire: pairs with the release in nvs_agent_goodbye */
    while (!atomic_load_explicit(&nvs_agent_departing, memory_order_acquire)) {
        nvs_link_serve(&handlers);
        uint64_t due = serve_gpus();
        due = earlier(earlier(due, nvs_link_due()), complain());
        sleep_until(nvs_link_restless() ? 0 : due);
    }
    depart();
    return NULL;
}
