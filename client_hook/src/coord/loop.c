/* The agent thread: joins transport, lease, gate, memory and pacing.
 *
 * It sleeps in ppoll() on the eventfd of the application's threads and the connection, with a time-out only while
 * something is due: a drain, the detection of idleness while somebody waits for our lease, a memory report, a new
 * connection.  The mailboxes are levels, not edges: each round looks at all of them, so a poke may be lost in another.
 *
 * A drain is done in slices, so that the other GPUs of the process, the connection and exit() are served meanwhile.  Memory is
 * moved by other threads (moves.h).
 *
 * May not go here: functions that an application's thread calls.
 */
#define _GNU_SOURCE /* ppoll */
#include "base/clock.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process/futex.h"
#include "coord/agent.h"
#include "coord/host.h"
#include "coord/lease.h"
#include "coord/moves.h"
#include "coord/protocol/link.h"
#include "coord/protocol/transport.h"
#include "coord/protocol/wire.gen.h"
#include "coord/state.h"
#include "gate/gate.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "nvshare.h"

#include <poll.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

/* At most one memory report in that time, but always one before a release.  Where no memory moves nobody acts upon it. */
#define REPORT_NS (nvs_config.memory_mode == NVS_MODE_DEVICE ? 100000000u : 10000000u)
#define SAY_AGAIN_NS 60000000000u
#define COMPLAIN_NS 3000000000u     /* without a coordinator, with threads waiting for one */
#define NAP_NS 25000u               /* on standby */
#define DEAF_NS 10000000u           /* between two looks at the mailboxes, without the eventfd */
#define LONGEST_STANDBY_NS 20000000u

static bool deaf;               /* the program has closed the eventfd */
static uint64_t awake_until_ns; /* on standby: nap instead of sleeping, so that the grant finds a processor awake */

/* --- memory that moves --- */

static void move_memory(const nvs_move_order *order)
{
    const nvs_agent_gpu *mine = &nvs_agent_gpus[order->gpu];
    if (!nvs_lease_open(&mine->lease) && !nvs_agent_ending(mine)) {
        nvs_moves_begin(order);
        return;
    }
    nvs_agent_report_memory(order->gpu, nvs_now_ns()); /* only what nobody uses may move */
    NVS_LINK_SEND(move_progress, (uint8_t)order->gpu, order->order_id, 0, 0, true, CUDA_ERROR_NOT_PERMITTED);
}

static void settle(uint32_t gpu)
{
    atomic_store_explicit(&nvs_mail[gpu].settled, 1, memory_order_release); /* pairs with nvs_agent_attach */
    nvs_futex_wake(&nvs_mail[gpu].settled, INT32_MAX);
}

/* --- the connection --- */

static void on_lost(void)
{
    atomic_store_explicit(&nvs_agent_connected, 0, memory_order_relaxed); /* a hint for those who wait */
    nvs_agent_unanswered_count = 0;
    nvs_moves_void();
    nvs_budget_lost();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_agent_happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_DISCONNECTED});
}

static void on_connected(void)
{
    nvs_agent_unanswered_count = 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_agent_happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_CONNECTED});
}

static void on_rejected(const nvs_rejected *rejected)
{
    static uint64_t say_again_ns;
    uint64_t now = nvs_now_ns();
    if (rejected->code == NVS_REJECTION_UNKNOWN_GPU && nvs_agent_unanswered_count > 0) {
        uint32_t gpu = nvs_agent_unanswered[0]; /* the coordinator answers in order */
        nvs_agent_answered(gpu);
        nvs_log(NVS_LOG_WARNING, "GPU %u is not shared: %s", gpu, rejected->text);
        nvs_agent_happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_NOT_MANAGED});
        settle(gpu);
        return;
    }
    if (rejected->code == NVS_REJECTION_UNKNOWN_MESSAGE && nvs_budget_rejected())
        return;
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
    nvs_agent_answered(gpu);
    atomic_store_explicit(&nvs_ledgers[gpu].limit_of_slot, settings->limit_of_slot, memory_order_relaxed); /* see memory/records/ledger.h */
    nvs_memory_set_limits(gpu, settings->memory_limit_bytes, settings->capacity_bytes, settings->reserve);
    nvs_memory_set_resident_limit(gpu, settings->resident_limit_bytes);
    nvs_pacing_set_budget(gpu, settings->pacing_budget_ns);
    nvs_memory_prepare_host(gpu, settings->prepare_host_bytes);
    nvs_memory_set_room(gpu, settings->room_bytes);
    if (settings->room_bytes != 0 && settings->resident_limit_bytes == settings->room_bytes)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "other programs have memory on GPU %u that cannot move: %llu MiB of this program fit beside it, the rest runs "
                     "from host memory, slowly (nvshare-ctl status names them)", gpu, (unsigned long long)(settings->room_bytes >> 20));
    atomic_store_explicit(&nvs_mail[gpu].ask_pins, settings->ask_pins, memory_order_relaxed); /* see its declaration */
    nvs_agent_gpus[gpu].settled = true;
    nvs_agent_happen(gpu, &(nvs_lease_event){
                    .kind = NVS_LEASE_ON_SETTINGS, .number = settings->pacing_budget_ns, .other = settings->idle_release_ns});
    settle(gpu);
}

static void put_answer(nvs_question *to, uint32_t sequence, uint64_t bytes)
{
    atomic_store_explicit(&to->answer, bytes, memory_order_relaxed);      /* published by the next line */
    atomic_store_explicit(&to->answered, sequence, memory_order_release); /* pairs with ask() */
    nvs_futex_wake(&to->answered, INT32_MAX);
}

static void on_reserved(const nvs_memory_reserved *answer)
{
    atomic_store_explicit(&nvs_ledgers[answer->gpu].limited, answer->by_limit, memory_order_relaxed); /* see memory/records/ledger.h */
    nvs_memory_set_reserved(answer->gpu, answer->bytes);
    if (answer->sequence == nvs_agent_gpus[answer->gpu].reserve_sent)
        put_answer(&nvs_mail[answer->gpu].reserve, answer->sequence, answer->bytes);
}

static void on_pins(const nvs_pins_reserved *answer)
{
    if (answer->sequence == nvs_agent_gpus[answer->gpu].pins_sent)
        put_answer(&nvs_mail[answer->gpu].pins, answer->sequence, answer->bytes);
}

static void on_standby(const nvs_standby *standby)
{
    uint64_t within = standby->within_ns < LONGEST_STANDBY_NS ? standby->within_ns : LONGEST_STANDBY_NS;
    awake_until_ns = nvs_now_ns() + within;
    if (nvs_agent_gpus[standby->gpu].lease.state == NVS_LEASE_ASKED) /* else it is the end of our own turn that is near */
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
    if (about != UINT32_MAX && (about >= NVS_MAX_GPUS || !nvs_agent_gpus[about].known))
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
        nvs_budget_connected();
        nvs_log(NVS_LOG_INFO, "client %llu of %s", (unsigned long long)in.welcome.client_id, nvs_config.socket);
        return;
    case NVS_TYPE_REJECTED: on_rejected(&in.rejected); return;
    case NVS_TYPE_GPU_SETTINGS: on_settings(&in.gpu_settings); return;
    case NVS_TYPE_MEMORY_RESERVED: on_reserved(&in.memory_reserved); return;
    case NVS_TYPE_PINS_RESERVED: on_pins(&in.pins_reserved); return;
    case NVS_TYPE_EVICT:
        move_memory(&(nvs_move_order){in.evict.gpu, true, in.evict.order_id, in.evict.bytes, UINT64_MAX,
                                      {in.evict.handoff_socket, in.evict.handoff_token}});
        return;
    case NVS_TYPE_RESTORE:
        move_memory(&(nvs_move_order){in.restore.gpu, false, in.restore.order_id, in.restore.bytes, in.restore.credit_bytes,
                                      {in.restore.handoff_socket, in.restore.handoff_token}});
        return;
    case NVS_TYPE_MOVE_CREDIT:
        nvs_moves_credit(in.move_credit.gpu, in.move_credit.order_id, in.move_credit.credit_bytes);
        return;
    case NVS_TYPE_HOST_RESERVED: nvs_budget_answer(&in.host_reserved); return;
    case NVS_TYPE_GRANT:
        event = (nvs_lease_event){.kind = NVS_LEASE_ON_GRANT, .lease_id = in.grant.lease_id, .number = in.grant.waiters};
        awake_until_ns = 0;
        nvs_agent_happen(in.grant.gpu, &event);
        return;
    case NVS_TYPE_STANDBY: on_standby(&in.standby); return;
    case NVS_TYPE_REVOKE:
        event = (nvs_lease_event){
            .kind = NVS_LEASE_ON_REVOKE, .lease_id = in.revoke.lease_id, .number = in.revoke.drain_deadline_ns};
        nvs_agent_happen(in.revoke.gpu, &event);
        if (nvs_agent_ending(&nvs_agent_gpus[in.revoke.gpu]))
            nvs_agent_go_on_ending(in.revoke.gpu);
        return;
    case NVS_TYPE_WAITERS:
        event = (nvs_lease_event){
            .kind = NVS_LEASE_ON_WAITERS, .lease_id = in.waiters.lease_id, .number = in.waiters.waiters};
        nvs_agent_happen(in.waiters.gpu, &event);
        return;
    default: return;
    }
}

/* --- a round --- */

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
        nvs_agent_happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    else
        nvs_agent_carry_out(gpu, nvs_lease_use(&mine->lease, nvs_now_ns()), true);
    return true;
}

/* The settings say whether this coordinator, which may be another one than before, wants to be asked. */
static void ask_for_pins(uint32_t gpu)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    uint32_t asked = atomic_load_explicit(&mail->pins.asked, memory_order_acquire); /* pairs with ask() */
    if (asked == mine->pins_sent || !mine->settled)
        return;
    mine->pins_sent = asked;
    if (asked == atomic_load_explicit(&mail->pins.answered, memory_order_relaxed)) /* by an earlier coordinator; the agent's own */
        return;
    uint64_t bytes = atomic_load_explicit(&mail->pins.bytes, memory_order_relaxed); /* the acquire above */
    if (atomic_load_explicit(&mail->ask_pins, memory_order_relaxed) != 0) /* the agent's own */
        NVS_LINK_SEND(reserve_pins, (uint8_t)gpu, asked, bytes);
    else
        put_answer(&mail->pins, asked, UINT64_MAX);
}

static void look_at_mailbox(uint32_t gpu, uint64_t now)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    nvs_agent_gpu *mine = &nvs_agent_gpus[gpu];
    if (nvs_gate_waiting(gpu) > 0 && !mine->lease.wanted && !nvs_lease_open(&mine->lease) && !nvs_agent_ending(mine))
        nvs_agent_happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    if (atomic_load_explicit(&mail->yield, memory_order_relaxed) != 0 &&
        atomic_exchange_explicit(&mail->yield, 0, memory_order_seq_cst) != 0) /* pairs with nvshare_yield */
        nvs_agent_happen(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_YIELD});
    if (mine->lease.attached) {
        uint32_t asked = atomic_load_explicit(&mail->reserve.asked, memory_order_acquire); /* pairs with ask() */
        if (asked != mine->reserve_sent) {
            mine->reserve_sent = asked;
            uint64_t bytes = atomic_load_explicit(&mail->reserve.bytes, memory_order_relaxed); /* the acquire above */
            NVS_LINK_SEND(reserve_memory, (uint8_t)gpu, asked, bytes);
        }
        ask_for_pins(gpu);
        if (nvs_agent_memory_dirty(gpu) && !nvs_moves_busy(gpu) && now >= mine->reported_ns + REPORT_NS)
            nvs_agent_report_memory(gpu, now);
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
        nvs_agent_happen(gpu, &(nvs_lease_event){
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
        if (mine->incomplete)
            nvs_agent_complete(gpu, now);
        if (nvs_agent_ending(mine))
            nvs_agent_go_on_ending(gpu);
        tick(gpu, now); /* last: it arms itself again after an end that was called off */
        if (nvs_agent_ending(mine) && !nvs_moves_busy(gpu))
            due = 0;
        due = earlier(due, mine->tick_at_ns);
        if (mine->incomplete && !mine->opening)
            due = earlier(due, mine->incomplete_ns + mine->patience_ns);
        if (mine->lease.attached && nvs_agent_memory_dirty(gpu) && !nvs_moves_busy(gpu))
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
    if (deaf)
        due = earlier(due, now + DEAF_NS);
    const int events = atomic_load_explicit(&nvs_agent_eventfd, memory_order_relaxed); /* this thread wrote it */
    struct pollfd watched[2] = {{.fd = deaf ? -1 : events, .events = POLLIN}};
    watched[1].fd = nvs_link_descriptor(&watched[1].events); /* poll() passes over -1 */
    struct timespec wait = {0, 0};
    if (due != UINT64_MAX) {
        uint64_t left = due > now ? due - now : 0;
        wait.tv_sec = (time_t)(left / 1000000000u);
        wait.tv_nsec = (long)(left % 1000000000u);
    }
    (void)ppoll(watched, 2, due == UINT64_MAX ? NULL : &wait, NULL);
    if ((watched[0].revents & POLLNVAL) != 0) {
        deaf = true; /* the program has closed what is not its own; that number may be its own the next time */
        nvs_log(NVS_LOG_WARNING, "this program closes descriptors that it has not opened; it will answer a little later");
    } else if (watched[0].revents != 0) {
        uint64_t pokes;
        ssize_t taken = read(events, &pokes, sizeof pokes);
        (void)taken; /* empty: a round for nothing */
    }
    /* After the read and before the mailboxes are looked at: pairs with the exchange in nvs_agent_poke. */
    (void)atomic_exchange_explicit(&nvs_agent_poked, 0, memory_order_seq_cst);
}

/* exit() was called: what can be given back in order within its 50 ms is, and then nothing is called any more. */
static void depart(void)
{
    bool clean = nvs_moves_stop(10000000u);
    uint64_t until = nvs_now_ns() + 20000000u;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_state state = nvs_agent_gpus[gpu].lease.state;
        if (state != NVS_LEASE_HELD && state != NVS_LEASE_ENDING)
            continue;
        if (nvs_gate_close(gpu, until) != NVS_OK || nvs_drain_closed(gpu, until) != NVS_OK)
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
    memset(nvs_agent_gpus, 0, sizeof nvs_agent_gpus); /* after a fork there is what the parent's agent left */
    nvs_agent_unanswered_count = 0;
    awake_until_ns = 0;
    deaf = false;
    nvs_link_start();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lease_init(&nvs_agent_gpus[gpu].lease, nvs_config.run_on_loss, nvs_config.loss_timeout_ns);
        nvs_agent_gpus[gpu].tick_at_ns = UINT64_MAX;
    }
    /* acquire: pairs with the release in nvs_agent_goodbye */
    while (!atomic_load_explicit(&nvs_agent_departing, memory_order_acquire)) {
        nvs_link_serve(&handlers);
        nvs_moves_serve();
        uint64_t due = earlier(serve_gpus(), nvs_budget_serve(nvs_now_ns()));
        due = earlier(earlier(due, nvs_link_due()), complain());
        sleep_until(nvs_link_restless() ? 0 : due);
    }
    depart();
    return NULL;
}
