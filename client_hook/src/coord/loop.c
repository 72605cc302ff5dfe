/* The agent thread: joins transport, lease, gate, memory and pacing.
 *
 * It sleeps in ppoll() on the eventfd of the application's threads and the connection, for a second unless something is due earlier: a drain, a phase
 * of a limited rate, the detection of idleness while other programs wait, a report of memory or progress, a new connection.  Each round reads all
 * mailboxes, so several pokes may cause one round.
 *
 * A drain is done in slices, so that the other GPUs of the process, the connection and exit() are served meanwhile.  Memory is
 * moved by other threads (moves.h).
 *
 * Non-goals: functions that an application's thread calls.
 */
#define _GNU_SOURCE /* ppoll */
#include "coord/loop.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "coord/lease.h"
#include "coord/mailbox.h"
#include "coord/memory/budget.h"
#include "coord/memory/moves.h"
#include "coord/memory/report.h"
#include "coord/messages.h"
#include "coord/progress.h"
#include "coord/protocol/link.h"
#include "coord/protocol/transport.h"
#include "coord/protocol/wire.gen.h"
#include "coord/waiting/notice.h"
#include "gate/gate.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "nvshare.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#define WARN_NS 3000000000u     /* without a coordinator, with threads waiting for one */
#define NAP_NS 25000u               /* on standby */
#define LOOK_NS 1000000000u         /* between two looks at the descriptors: a program that closes them wakes no poll */

static bool becomes_known(uint32_t gpu)
{
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (mine->known)
        return true;
    /* acquire: pairs with the release in describe() */
    if (atomic_load_explicit(&nvs_mail[gpu].facts_state, memory_order_acquire) != NVS_FACTS_KNOWN)
        return false;
    mine->known = true;
    if (nvs_gate_waiting(gpu) > 0) /* so that AttachGpu carries the wish */
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    else
        nvs_agent_carry_out(gpu, nvs_lease_use(&mine->lease, nvs_now_ns()), true);
    return true;
}

/* The settings of each coordinator say whether it takes requests for pins. */
static void ask_for_pins(uint32_t gpu)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    uint32_t asked = atomic_load_explicit(&mail->pins.asked, memory_order_acquire); /* pairs with ask() */
    if (asked == mine->connection.pins)
        return;
    mine->connection.pins = asked;
    if (asked == atomic_load_explicit(&mail->pins.answered, memory_order_relaxed)) /* by an earlier coordinator; only the agent writes it */
        return;
    uint64_t bytes = atomic_load_explicit(&mail->pins.bytes, memory_order_relaxed); /* the acquire above */
    if (atomic_load_explicit(&mail->ask_pins, memory_order_relaxed) != 0) /* only the agent writes it */
        NVS_LINK_SEND(reserve_pins, (uint8_t)gpu, asked, bytes);
    else
        nvs_question_answer(&mail->pins, asked, UINT64_MAX);
}

static void look_at_mailbox(uint32_t gpu, uint64_t now)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (nvs_gate_waiting(gpu) > 0 && !mine->lease.wanted && !nvs_lease_open(&mine->lease) && !nvs_agent_ending(mine))
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    if (atomic_load_explicit(&mail->yield, memory_order_relaxed) != 0 &&
        atomic_exchange_explicit(&mail->yield, 0, memory_order_seq_cst) != 0) /* pairs with nvshare_yield */
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_YIELD});
    if (mine->lease.link.attached && mine->connection.settled) { /* else the GPU may be refused */
        uint32_t asked = atomic_load_explicit(&mail->reserve.asked, memory_order_acquire); /* pairs with ask() */
        if (asked != mine->connection.reserve) {
            mine->connection.reserve = asked;
            uint64_t bytes = atomic_load_explicit(&mail->reserve.bytes, memory_order_relaxed); /* the acquire above */
            NVS_LINK_SEND(reserve_memory, (uint8_t)gpu, asked, bytes);
        }
        ask_for_pins(gpu);
        if (nvs_report_is_due(gpu) && !nvs_moves_busy(gpu) && now >= nvs_report_at(gpu))
            nvs_report_memory(gpu, now);
    }
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
        nvs_agent_event(gpu, &(nvs_lease_event){
                        .kind = NVS_LEASE_ON_TICK, .number = nvs_gate_calls(gpu), .flag = nvs_gate_in_use(gpu) || nvs_moves_busy(gpu)});
        next = nvs_lease_next_tick(&mine->lease, now);
        mine->tick_at_ns = next;
    }
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static uint64_t serve_gpus(void)
{
    uint64_t due = UINT64_MAX;
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
        if (nvs_agent_ending(mine) && !nvs_moves_busy(gpu))
            due = 0;
        due = earlier(due, mine->tick_at_ns);
        if (mine->opening.pending && !mine->opening.restoring)
            due = earlier(due, mine->opening.since_ns + mine->opening.patience_ns);
        if (mine->lease.link.attached && mine->connection.settled && nvs_report_is_due(gpu) && !nvs_moves_busy(gpu))
            due = earlier(due, nvs_report_at(gpu));
        due = earlier(due, nvs_notice_serve(gpu, mine->lease.state == NVS_LEASE_ASKED, now));
        const bool runs = mine->lease.state == NVS_LEASE_HELD && !mine->opening.pending;
        due = earlier(due, nvs_progress_serve(gpu, runs ? mine->lease.grant.id : 0, now));
    }
    return due;
}

/* Logs once that threads wait for a coordinator that does not answer, which looks like a hang.  Returns when it is due. */
static uint64_t warn_without_coordinator(void)
{
    static uint64_t since_ns;
    static bool logged;
    bool waiting = false;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && !logged && !nvs_link_up(); gpu++)
        waiting = waiting || nvs_gate_waiting(gpu) > 0;
    if (!waiting) {
        since_ns = 0;
        return UINT64_MAX;
    }
    uint64_t now = nvs_now_ns();
    if (since_ns == 0)
        since_ns = now;
    if (now < since_ns + WARN_NS)
        return since_ns + WARN_NS;
    logged = true;
    if (nvs_transport_connect_error() == EACCES)
        nvs_log(NVS_LOG_WARNING, "this user may not connect to the coordinator at %s; waiting for permission (use a coordinator of this user's or the "
                "system's, or unset NVSHARE_SOCKET to run without sharing)", nvs_config.socket);
    else
        nvs_log(NVS_LOG_WARNING, "no coordinator answers at %s; waiting for it (start nvshare-coordinator, or unset "
                "NVSHARE_SOCKET to run without sharing)", nvs_config.socket);
    return UINT64_MAX;
}

static void sleep_until(uint64_t due)
{
    uint64_t now = nvs_now_ns();
    if (now < nvs_awake_until_ns)
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
    bool clean = nvs_moves_stop(10000000u);
    uint64_t until = nvs_now_ns() + 20000000u;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_state state = nvs_agent_gpus[gpu].lease.state;
        if (state != NVS_LEASE_HELD && state != NVS_LEASE_ENDING)
            continue;
        if (nvs_gate_close(gpu, until) != NVS_OK || nvs_drain_closed(gpu, until) != NVS_OK)
            clean = false; /* the coordinator notices the end of the process */
    }
    if (clean && nvs_link_up()) {
        uint8_t frame[8];
        nvs_goodbye message = {0};
        nvs_link_send(frame, nvs_encode_goodbye(&message, frame, sizeof frame));
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
    nvs_agent_unanswered_count = 0;
    nvs_progress_start();
    nvs_notice_start();
    nvs_awake_until_ns = 0;
    nvs_link_start();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_init(&nvs_agent_gpus[gpu].lease, nvs_config.on_loss.run, nvs_config.on_loss.timeout_ns);
        nvs_duty_init(&nvs_agent_gpus[gpu].duty);
        nvs_agent_gpus[gpu].tick_at_ns = UINT64_MAX;
    }
    /* acquire: pairs with the release in at_exit (agent.c) */
    while (!atomic_load_explicit(&nvs_agent_departing, memory_order_acquire)) {
        nvs_link_serve(&nvs_message_handlers);
        nvs_moves_serve();
        uint64_t due = earlier(serve_gpus(), nvs_budget_serve(nvs_now_ns()));
        due = earlier(earlier(due, nvs_link_due()), warn_without_coordinator());
        sleep_until(nvs_link_has_more() ? 0 : due);
    }
    depart();
    return NULL;
}
