/* The agent thread: joins transport, lease, gate, memory and pacing.
 *
 * It sleeps in ppoll() on the eventfd of the application's threads and the connection, for a second unless something is due earlier: a drain, a phase
 * of a limited rate, the detection of idleness while other programs wait, a State, a report of progress, a new connection.  Each round reads all
 * mailboxes, so several pokes may cause one round.
 *
 * A drain is done in slices, so that the other GPUs of the process, the connection and exit() are served meanwhile.  Memory is
 * moved by other threads (mover.h).
 *
 * A wait that lasts has one line on standard error, and one at its end: after 5 s the agent asks the coordinator what the program waits for, and prints
 * the answer.  A program that often waits long gets such lines at most once a minute.
 *
 * Non-goals: functions that an application's thread calls.
 */
#define _GNU_SOURCE /* ppoll */
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "coord/lease.h"
#include "coord/mailbox.h"
#include "coord/mover.h"
#include "coord/parking.h"
#include "coord/protocol/link.h"
#include "coord/protocol/wire.gen.h"
#include "coord/state.h"
#include "gate/gate.h"
#include "host/pool.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "nvshare.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* --- notices --- */

#define PATIENCE_NS 5000000000u
#define QUIET_NS 60000000000u /* between the end of one wait that was printed and the next such line */

static struct wait {
    uint64_t since_ns; /* of the present wait; 0: no thread waits */
    uint64_t quiet_until_ns;
    uint32_t index;    /* the GPU's number on the node, known once `printed` */
    bool asked, printed;
} waits[NVS_MAX_GPUS];

static void notice_start(void)
{
    memset(waits, 0, sizeof waits);
}

static void end(struct wait *wait, bool passed, uint64_t now)
{
    if (wait->printed) {
        wait->quiet_until_ns = now + QUIET_NS;
        if (passed) /* else the threads have gone without the GPU */
            nvs_log_notice("GPU %u after %llu s", wait->index, (unsigned long long)((now - wait->since_ns) / 1000000000u));
    }
    wait->since_ns = 0;
    wait->asked = wait->printed = false;
}

/* `asked`: the coordinator has this client's request.  Returns when to serve again; UINT64_MAX: no deadline. */
static uint64_t notice_serve(uint32_t gpu, bool asked, uint64_t now)
{
    struct wait *wait = &waits[gpu];
    const bool passed = nvs_gate_passes(gpu);
    if (atomic_exchange_explicit(&nvs_mail[gpu].stopped, 0, memory_order_relaxed) != 0) /* see agent.c */
        nvs_log_notice("a signal has ended the wait for the GPU; the call that waited fails with CUDA error %d", NVS_STOPPED_RESULT);
    if (passed || !nvs_agent_wanted(gpu)) {
        if (wait->since_ns != 0)
            end(wait, passed, now);
        return UINT64_MAX;
    }
    if (wait->since_ns == 0)
        wait->since_ns = now;
    if (wait->asked || !asked)
        return UINT64_MAX;
    const uint64_t patient = wait->since_ns + PATIENCE_NS, at = patient > wait->quiet_until_ns ? patient : wait->quiet_until_ns;
    if (now < at)
        return at;
    wait->asked = true;
    NVS_LINK_SEND(explain_wait, (uint8_t)gpu);
    return UINT64_MAX;
}

static void notice_explained(const nvs_wait_explained *answer)
{
    struct wait *wait = &waits[answer->gpu];
    if (!wait->asked || wait->printed || nvs_gate_passes(answer->gpu))
        return;
    wait->printed = true;
    wait->index = answer->index;
    nvs_log_notice("%s", answer->text);
}

/* The connection: the question is open again. */
static void notice_lost(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        waits[gpu].asked = waits[gpu].printed;
}

#define LOG_AGAIN_NS 60000000000u
#define LONGEST_STANDBY_NS 20000000u

/* --- messages, and the begin and end of a connection --- */

/* On standby: the agent naps, so that a processor is awake for the grant. */
static uint64_t awake_until_ns;

static void settle(uint32_t gpu)
{
    atomic_store_explicit(&nvs_mail[gpu].settled, 1, memory_order_release); /* pairs with nvs_agent_attach */
    nvs_futex_wake(&nvs_mail[gpu].settled, INT32_MAX);
}

static bool reconnects; /* what concerns the program's variables is told once */

static void on_lost(void)
{
    reconnects = true;
    atomic_store_explicit(&nvs_agent_connected, 0, memory_order_relaxed); /* a hint */
    nvs_states_lost();
    notice_lost();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_progress_want(gpu, false, false);
        nvs_pressure_expect(gpu, false);
        nvs_agent_set_rate(gpu, NVS_DUTY_ALWAYS);
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_DISCONNECTED});
    }
}

static void on_connected(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_CONNECTED});
}

static void on_rejected(const nvs_rejected *rejected)
{
    static uint64_t log_again_ns;
    uint64_t now = nvs_now_ns();
    const uint32_t gpu = rejected->ordinal;
    const bool forbidden = rejected->code == NVS_REJECTION_FORBIDDEN_GPU;
    if ((forbidden || rejected->code == NVS_REJECTION_UNKNOWN_GPU) && nvs_agent_gpus[gpu].lease.link.attached && !nvs_agent_gpus[gpu].settled) {
        nvs_log(NVS_LOG_WARNING, forbidden ? "GPU %u is refused, its work never runs: %s" : "GPU %u is not shared: %s", gpu, rejected->text);
        if (forbidden) {
            nvs_memory_set_limits(gpu, 0, 1, 0, false);
            nvs_memory_set_refusal(rejected->text);
        }
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_NOT_MANAGED, .flag = forbidden});
        settle(gpu);
        return;
    }
    if (rejected->code == NVS_REJECTION_OUT_OF_MEMORY)
        nvs_memory_set_refusal(rejected->text);
    if (now >= log_again_ns || !rejected->final) {
        const bool loud = rejected->final || (rejected->code == NVS_REJECTION_NOT_ALLOWED && !reconnects);
        nvs_log(loud ? NVS_LOG_WARNING : NVS_LOG_INFO, "the coordinator refuses (%u): %s", rejected->code, rejected->text);
        log_again_ns = rejected->final ? now + LOG_AGAIN_NS : log_again_ns;
    }
    if (rejected->final)
        nvs_link_refused();
}

static void on_settings(const nvs_gpu_settings *settings)
{
    uint32_t gpu = settings->gpu;
    atomic_store_explicit(&nvs_ledgers[gpu].quota.limit_of_slot, settings->limit_of_slot, memory_order_relaxed); /* see memory/quota.h */
    atomic_store_explicit(&nvs_ledgers[gpu].quota.slot, settings->slot_bytes, memory_order_relaxed);             /* likewise */
    nvs_memory_set_limits(gpu, settings->memory_limit_bytes, settings->capacity_bytes, settings->room_bytes, settings->reserve);
    if (nvs_swapping())
        nvs_host_ahead(gpu, settings->prepare_host_bytes, settings->prepare_now);
    nvs_pressure_expect(gpu, settings->prepare_host_bytes > 0);
    atomic_store_explicit(&nvs_mail[gpu].ask_pins, settings->ask_pins, memory_order_relaxed); /* see its declaration */
    nvs_agent_gpus[gpu].settled = true;
    nvs_agent_set_pacing(gpu, settings->pacing_budget_ns, settings->idle_release_ns);
    nvs_agent_set_rate(gpu, settings->rate);
    nvs_progress_want(gpu, settings->report, settings->watch);
    settle(gpu);
}

static void on_target(const nvs_target *target)
{
    const nvs_agent_gpu *mine = &nvs_agent_gpus[target->gpu];
    nvs_target_received(target, nvs_lease_open(&mine->lease) || nvs_agent_ending(mine));
}

static void on_standby(const nvs_standby *standby)
{
    uint64_t within = standby->within_ns < LONGEST_STANDBY_NS ? standby->within_ns : LONGEST_STANDBY_NS;
    awake_until_ns = nvs_now_ns() + within;
    if (nvs_agent_gpus[standby->gpu].lease.state == NVS_LEASE_ASKED) /* else the program's own lease is about to end */
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
    const bool is_host = in.type == NVS_TYPE_TARGET && about == NVS_WIRE_HOST;
    if (about != UINT32_MAX && !is_host && (about >= NVS_MAX_GPUS || !nvs_agent_knows(about)))
        result = NVS_WIRE_MALFORMED;
    if (result != NVS_WIRE_OK) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the coordinator sent something malformed; connecting again");
        nvs_link_fail();
        return;
    }
    switch (in.type) {
    case NVS_TYPE_WELCOME:
        atomic_store_explicit(&nvs_agent_connected, 1, memory_order_relaxed); /* a hint */
        nvs_budget_connected();
        nvs_log(NVS_LOG_INFO, "client %llu of %s", (unsigned long long)in.welcome.client_id, nvs_config.socket);
        return;
    case NVS_TYPE_REJECTED: on_rejected(&in.rejected); return;
    case NVS_TYPE_GPU_SETTINGS: on_settings(&in.gpu_settings); return;
    case NVS_TYPE_TARGET: (is_host ? nvs_budget_received : on_target)(&in.target); return;
    case NVS_TYPE_GRANT:
        awake_until_ns = 0;
        nvs_agent_event(about, &(nvs_lease_event){.kind = NVS_LEASE_ON_GRANT, .lease_id = in.grant.lease_id, .number = in.grant.waiters});
        return;
    case NVS_TYPE_PARK: nvs_parking_told(&in.park); return;
    case NVS_TYPE_WAIT_EXPLAINED: notice_explained(&in.wait_explained); return;
    case NVS_TYPE_STANDBY: on_standby(&in.standby); return;
    case NVS_TYPE_REVOKE:
        nvs_agent_event(about, &(nvs_lease_event){
                        .kind = NVS_LEASE_ON_REVOKE, .lease_id = in.revoke.lease_id, .number = in.revoke.drain_deadline_ns});
        if (nvs_agent_ending(&nvs_agent_gpus[about]))
            nvs_agent_continue_end(about);
        return;
    case NVS_TYPE_WAITERS:
        nvs_agent_event(about, &(nvs_lease_event){.kind = NVS_LEASE_ON_WAITERS, .lease_id = in.waiters.lease_id, .number = in.waiters.waiters});
        return;
    default: return;
    }
}

static const nvs_link_handlers message_handlers = {on_connected, on_lost, on_frame};

/* --- the thread --- */

#define WARN_NS 3000000000u     /* without a coordinator, with threads waiting for one */
#define WARN_HOLDER_NS 10000000000u /* likewise, with a lease from before; longer than a restart */
#define NAP_NS 25000u               /* on standby */
#define GIVE_BACK_NS 250000000u     /* between two looks at unused reservations */
#define LOOK_NS 1000000000u         /* between two looks at the descriptors: a program that closes them wakes no poll */

static bool becomes_known(uint32_t gpu)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (nvs_agent_knows(gpu))
        return true;
    /* acquire: pairs with the release in describe() */
    if (atomic_load_explicit(&nvs_mail[gpu].facts_state, memory_order_acquire) != NVS_FACTS_KNOWN)
        return false;
    if (nvs_gate_waiting(gpu) > 0) /* so that AttachGpu carries the wish */
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    else
        nvs_agent_carry_out(gpu, nvs_lease_use(&mine->lease, nvs_now_ns()), true);
    return true;
}

/* Else the coordinator may refuse the GPU. */
static bool is_settled(const nvs_agent_gpu *mine)
{
    return mine->lease.link.attached && mine->settled;
}

static void look_at_mailbox(uint32_t gpu, uint64_t now)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (nvs_agent_wanted(gpu) && !mine->lease.wanted && !nvs_lease_open(&mine->lease) && !nvs_agent_ending(mine))
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    if (atomic_load_explicit(&mail->yield, memory_order_relaxed) != 0 &&
        atomic_exchange_explicit(&mail->yield, 0, memory_order_seq_cst) != 0) /* pairs with nvshare_yield */
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_YIELD});
    if (atomic_load_explicit(&mail->reopen, memory_order_relaxed) != 0 &&
        atomic_exchange_explicit(&mail->reopen, 0, memory_order_seq_cst) != 0) /* pairs with nvs_agent_reopen */
        nvs_agent_close_and_open(gpu);
    if (is_settled(mine) && now >= nvs_state_due(gpu))
        nvs_state_send(gpu);
}

static void tick(uint32_t gpu, uint64_t now)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    uint64_t next = nvs_lease_next_tick(&mine->lease, now);
    if (next == UINT64_MAX) {
        mine->tick_at_ns = UINT64_MAX;
    } else if (mine->tick_at_ns == UINT64_MAX) {
        mine->tick_at_ns = next;
    } else if (now >= mine->tick_at_ns) {
        nvs_agent_tick(gpu);
        next = nvs_lease_next_tick(&mine->lease, now);
        mine->tick_at_ns = next;
    }
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* GPUs that application threads have found to reach each other. */
static void look_at_links(void)
{
    const uint32_t links = atomic_load_explicit(&nvs_gate_links, memory_order_relaxed); /* only the agent writes it */
    const uint32_t wanted = links | atomic_load_explicit(&nvs_links_wanted, memory_order_acquire); /* pairs with nvs_agent_link */
    if (NVS_LIKELY(wanted == links))
        return;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((wanted >> gpu & 1) != 0 && !becomes_known(gpu))
            return;
    nvs_agent_link_gpus(wanted);
}

static uint64_t serve_gpus(void)
{
    uint64_t due = UINT64_MAX;
    look_at_links();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
        if (!becomes_known(gpu))
            continue;
        uint64_t now = nvs_now_ns();
        look_at_mailbox(gpu, now);
        if (mine->opening.pending)
            nvs_agent_continue_open(gpu, now);
        if (nvs_agent_ending(mine))
            nvs_agent_continue_end(gpu);
        due = earlier(due, nvs_agent_hold_rate(gpu));
        tick(gpu, now); /* last: after an end that was cancelled the tick is due again */
        if (nvs_agent_ending(mine) && !nvs_mover_state_of(gpu)->busy)
            due = 0;
        due = earlier(due, mine->tick_at_ns);
        if (mine->opening.pending && !mine->opening.restoring)
            due = earlier(due, mine->opening.since_ns + mine->opening.patience_ns);
        if (is_settled(mine))
            due = earlier(due, nvs_state_due(gpu));
        due = earlier(due, notice_serve(gpu, mine->lease.state == NVS_LEASE_ASKED, now));
        const bool runs = mine->lease.state == NVS_LEASE_HELD && !mine->opening.pending;
        due = earlier(due, nvs_progress_serve(gpu, runs ? mine->lease.grant.id : 0, now));
    }
    return due;
}

/* Gives back what was reserved in advance and is not used: other programs may be refused for it.  Returns when it is due again. */
static uint64_t give_back(void)
{
    static uint64_t again_ns;
    static bool again; /* something unused is kept for the present */
    const uint64_t now = nvs_now_ns();
    if (now < again_ns)
        return again ? again_ns : UINT64_MAX;
    again = nvs_budget_spare();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        const nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
        const nvs_question *of = &nvs_mail[gpu].reserve;
        nvs_usage usage;
        bool less;
        if (!is_settled(mine) || atomic_load_explicit(&of->asked, memory_order_relaxed) != of->heard) /* a question is open */
            continue;
        nvs_memory_usage(gpu, &usage);
        again |= nvs_memory_spare(gpu, usage.resident_bytes, &less);
        if (less)
            nvs_state_send(gpu);
    }
    again_ns = now + GIVE_BACK_NS;
    return again ? again_ns : UINT64_MAX;
}

/* Logs once that no coordinator answers threads that wait, which looks like a hang, and once that none answers a program that goes on with the GPU.
 * Returns when it is due. */
static uint64_t warn_without_coordinator(void)
{
    static uint64_t since_ns;
    static bool said_waiting, said_holding;
    bool waiting = false, holding = false;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && !nvs_link_up(); gpu++) {
        waiting = waiting || (!said_waiting && nvs_gate_waiting(gpu) > 0);
        holding = holding || (!said_holding && nvs_agent_gpus[gpu].lease.state == NVS_LEASE_HELD);
    }
    if (!waiting && !holding) {
        since_ns = 0;
        return UINT64_MAX;
    }
    uint64_t now = nvs_now_ns();
    if (since_ns == 0)
        since_ns = now;
    const uint64_t due = since_ns + (waiting ? WARN_NS : WARN_HOLDER_NS);
    if (now < due)
        return due;
    said_waiting |= waiting;
    said_holding |= !waiting;
    if (!waiting)
        nvs_log(NVS_LOG_WARNING, "no coordinator answers at %s any more; this program goes on with the GPU, without turns, until one does (start "
                "nvshare-coordinator; in a container, start it again if that directory was made anew)", nvs_config.socket);
    else if (nvs_transport_connect_error() == EACCES)
        nvs_log(NVS_LOG_WARNING, "this user may not connect to the coordinator at %s; waiting for permission (use a coordinator of this user's or the "
                "system's, or set NVSHARE_DISABLE=1 to run without sharing)", nvs_config.socket);
    else
        nvs_log(NVS_LOG_WARNING, "no coordinator answers at %s; waiting for it (start nvshare-coordinator, or set "
                "NVSHARE_DISABLE=1 to run without sharing)", nvs_config.socket);
    return UINT64_MAX;
}

static void sleep_until(uint64_t due)
{
    uint64_t now = nvs_now_ns();
    if (now < awake_until_ns)
        due = earlier(due, now + NAP_NS);
    due = earlier(due, now + LOOK_NS);
    struct pollfd watched[2] = {{.fd = nvs_agent_eventfd(true), .events = POLLIN}};
    watched[1].fd = nvs_link_descriptor(&watched[1].events); /* poll() passes over -1 */
    const uint64_t left = due > now ? due - now : 0;
    const struct timespec wait = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    (void)ppoll(watched, 2, &wait, NULL);
    if (watched[0].revents != 0) {
        uint64_t pokes;
        ssize_t taken = read(nvs_agent_eventfd(false), &pokes, sizeof pokes);
        (void)taken; /* empty: a round for nothing */
    }
    /* After the read and before the mailboxes are looked at: pairs with the exchange in nvs_agent_poke. */
    (void)atomic_exchange_explicit(&nvs_agent_poked, 0, memory_order_seq_cst);
}

/* After exit() was called: gives the leases back within its 50 ms if that is possible.  No calls follow. */
static void depart(void)
{
    bool clean = nvs_movers_stop(10000000u);
    uint64_t until = nvs_now_ns() + 20000000u;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_state state = nvs_agent_gpus[gpu].lease.state;
        if (state != NVS_LEASE_HELD && state != NVS_LEASE_ENDING)
            continue;
        if (nvs_gate_close(gpu, until) != NVS_OK || nvs_drain_closed(gpu, until) != NVS_OK)
            clean = false; /* the coordinator notices the end of the process */
    }
    if (clean && nvs_link_up()) {
        NVS_LINK_SEND(goodbye, 0);
        nvs_transport_finish(10);
    }
    atomic_store_explicit(&nvs_agent_departed, 1, memory_order_release); /* pairs with at_exit */
    nvs_futex_wake(&nvs_agent_departed, INT32_MAX);
}

void *nvs_agent_main(void *nothing)
{
    (void)prctl(PR_SET_NAME, "nvshare", 0, 0, 0);
    (void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    memset(nvs_agent_gpus, 0, sizeof nvs_agent_gpus); /* after a fork there is what the parent's agent left */
    nvs_progress_start();
    notice_start();
    nvs_parking_start();
    awake_until_ns = 0;
    nvs_link_start();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_init(&nvs_agent_gpus[gpu].lease, nvs_config.on_loss.run, nvs_config.on_loss.timeout_ns);
        nvs_duty_init(&nvs_agent_gpus[gpu].duty);
        nvs_agent_gpus[gpu].tick_at_ns = UINT64_MAX;
    }
    /* acquire: pairs with the release in at_exit (agent.c) */
    while (!atomic_load_explicit(&nvs_agent_departing, memory_order_acquire)) {
        nvs_link_serve(&message_handlers);
        nvs_targets_look();
        uint64_t due = earlier(serve_gpus(), nvs_budget_serve(nvs_now_ns()));
        due = earlier(due, nvs_parking_serve(nvs_now_ns()));
        due = earlier(due, give_back());
        due = earlier(earlier(due, nvs_link_due()), warn_without_coordinator());
        sleep_until(nvs_link_has_more() ? 0 : due);
    }
    depart();
    return NULL;
}
