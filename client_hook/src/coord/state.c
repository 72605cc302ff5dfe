/* See state.h. */
#include "coord/state.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "coord/mailbox.h"
#include "coord/mover.h"
#include "coord/protocol/link.h"
#include "gate/gate.h"
#include "host/pool.h"
#include "memory/memory.h"

#include <errno.h>
#include <string.h>

/* --- reports --- */

/* At most one report in that time.  In mode `device` no memory moves, and the coordinator acts upon no report. */
#define REPORT_NS (nvs_config.memory_mode == NVS_MODE_DEVICE ? 100000000u : 10000000u)

static uint64_t reported_ns[NVS_MAX_GPUS];

void nvs_report_memory(uint32_t gpu, uint64_t now_ns)
{
    nvs_usage usage;
    /* seq_cst: the flag goes before the figures are read, see nvs_agent_memory_changed */
    (void)atomic_exchange_explicit(&nvs_ledgers[gpu].to_report, 0, memory_order_seq_cst);
    nvs_memory_usage(gpu, &usage);
    reported_ns[gpu] = now_ns;
    NVS_LINK_SEND(memory_report, (uint8_t)gpu, usage.allocated_bytes, usage.resident_bytes, usage.pinned_bytes,
                  usage.host_bytes, atomic_load_explicit(&nvs_mail[gpu].released_bytes, memory_order_relaxed), /* see its declaration */
                  nvs_host_ready_bytes(), nvs_gate_linked_with(gpu) != UINT32_C(1) << gpu);
}

bool nvs_report_is_due(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_ledgers[gpu].to_report, memory_order_seq_cst) != 0; /* pairs with the exchange above */
}

uint64_t nvs_report_at(uint32_t gpu)
{
    return reported_ns[gpu] + REPORT_NS;
}

/* --- the share of the node's host memory --- */

#define ANSWER_NS 2000000000u

NVS_FORK_STATE static nvs_question mail = {.asking = PTHREAD_MUTEX_INITIALIZER};

/* Of the agent thread. */
NVS_FORK_STATE static enum { NO_BUDGET, ASKED, BUDGET } state;
NVS_FORK_STATE static uint32_t sequence;       /* of the last message */
NVS_FORK_STATE static uint32_t question;       /* the newest of the mailbox that was sent */
NVS_FORK_STATE static uint64_t unanswered_ns;  /* since when a message has no answer; 0: all have */

/* An application's thread. */
void nvs_agent_reserve_host(uint64_t total_bytes)
{
    int saved = errno;
    if (atomic_load_explicit(&nvs_agent_connected, memory_order_relaxed) != 0) /* a hint: without a connection nobody answers */
        (void)nvs_question_ask(&mail, total_bytes, 0);
    errno = saved;
}

static void answered(void)
{
    nvs_question_answer(&mail, question, UINT64_MAX);
}

static void send(uint64_t bytes)
{
    NVS_LINK_SEND(reserve_host, ++sequence, bytes);
    unanswered_ns = nvs_now_ns();
}

static void no_budget(void)
{
    state = NO_BUDGET;
    unanswered_ns = 0;
    nvs_host_set_share(false, 0);
    answered();
}

void nvs_budget_connected(void)
{
    if (nvs_config.memory_mode != NVS_MODE_SWAP)
        return;
    state = ASKED;
    nvs_host_set_share(true, 0); /* allocations before the answer ask too */
    send(nvs_host_share_in_use());
}

void nvs_budget_lost(void)
{
    if (state != NO_BUDGET)
        no_budget();
}

void nvs_budget_answer(const nvs_host_reserved *answer)
{
    if (answer->sequence != sequence || state == NO_BUDGET)
        return; /* a newer one is under way */
    state = BUDGET;
    unanswered_ns = 0;
    nvs_host_set_share(true, answer->bytes);
    answered();
}

bool nvs_budget_rejected(void)
{
    if (state != ASKED || unanswered_ns == 0)
        return false;
    nvs_log(NVS_LOG_INFO, "the coordinator has no budget of host memory");
    no_budget();
    return true;
}

bool nvs_budget_spare(void)
{
    uint64_t keep = UINT64_MAX;
    const bool again = state == BUDGET && (unanswered_ns != 0 || nvs_host_spare_share(&keep));
    if (keep != UINT64_MAX)
        send(keep);
    return again;
}

uint64_t nvs_budget_serve(uint64_t now_ns)
{
    uint32_t asked = atomic_load_explicit(&mail.asked, memory_order_acquire); /* pairs with nvs_question_ask */
    if (asked != question) {
        question = asked;
        if (state != NO_BUDGET)
            send(atomic_load_explicit(&mail.bytes, memory_order_relaxed)); /* the acquire above */
        else
            answered();
    }
    if (unanswered_ns == 0)
        return UINT64_MAX;
    if (now_ns >= unanswered_ns && now_ns - unanswered_ns >= ANSWER_NS) {
        nvs_log(NVS_LOG_INFO, "no answer about host memory; going on without a budget");
        no_budget();
        return UINT64_MAX;
    }
    return unanswered_ns + ANSWER_NS;
}

/* --- orders --- */

/* Of the agent thread. */
NVS_FORK_STATE static struct order {
    bool open, out;
    uint8_t gpu;
    uint64_t id, bytes;
    uint64_t credit;        /* of `bytes`: so many may move now */
    uint64_t before;        /* bytes on the GPU at its begin */
    nvs_mover_state its;    /* the mover's, at its begin and with the news of the last report */
} orders[NVS_MAX_GPUS];

static void aim(const struct order *o)
{
    const uint64_t out = o->before > o->bytes ? o->before - o->bytes : 0;
    const uint64_t in = o->credit < UINT64_MAX - o->before ? o->before + o->credit : UINT64_MAX;
    nvs_mover_aim(o->gpu, &(nvs_goal){.bytes = o->out ? out : in, .rises = o->credit < o->bytes, .promised = true});
}

static void tell(struct order *o, bool finished)
{
    const nvs_mover_state *its = nvs_mover_state_of(o->gpu);
    const uint64_t now = nvs_memory_resident(o->gpu), in = its->in_bytes - o->its.in_bytes;
    const uint64_t moved = o->out ? (o->before > now ? o->before - now : 0) : in < o->credit ? in : o->credit;
    o->its.news = its->news;
    NVS_LINK_SEND(move_progress, o->gpu, o->id, moved, its->moving_ns - o->its.moving_ns, finished, finished ? its->error : 0);
}

static void end(struct order *o)
{
    o->open = false;
    nvs_report_memory(o->gpu, nvs_now_ns());
    tell(o, true);
}

void nvs_order_begin(uint8_t gpu, uint64_t id, bool out, uint64_t bytes, uint64_t credit_bytes)
{
    struct order *o = &orders[gpu];
    const nvs_mover_state *its = nvs_mover_state_of(gpu);
    nvs_movers_look();
    if (o->open)
        end(o);
    *o = (struct order){.open = true, .out = out, .gpu = gpu, .id = id, .bytes = bytes, .credit = credit_bytes < bytes ? credit_bytes : bytes,
                        .before = nvs_memory_resident(gpu), .its = *its};
    aim(o);
}

void nvs_order_credit(const nvs_move_credit *more)
{
    struct order *o = &orders[more->gpu];
    const uint64_t credit = more->credit_bytes < o->bytes ? more->credit_bytes : o->bytes;
    nvs_movers_look();
    if (!o->open || o->id != more->order_id || credit <= o->credit || nvs_mover_state_of(more->gpu)->hurried)
        return; /* hurried: it ends with what it has */
    o->credit = credit;
    aim(o);
}

void nvs_orders_lost(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        if (orders[gpu].open)
            nvs_mover_hold(gpu);
        orders[gpu].open = false;
    }
}

void nvs_orders_serve(void)
{
    nvs_movers_look();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        struct order *o = &orders[gpu];
        const nvs_mover_state *its = nvs_mover_state_of(gpu);
        const bool waits = its->lacks && o->credit < o->bytes && !its->hurried && its->error == 0;
        if (o->open && !its->busy && !waits)
            end(o);
        else if (o->open && its->news != o->its.news)
            tell(o, false);
    }
}

bool nvs_moves_busy(uint32_t gpu)
{
    return orders[gpu].open || nvs_mover_state_of(gpu)->busy;
}

NVS_FORK_CODE void nvs_state_after_fork(void)
{
    pthread_mutex_init(&mail.asking, NULL); /* a thread that does not exist here may have held it */
    atomic_store_explicit(&mail.asked, 0, memory_order_relaxed);
    atomic_store_explicit(&mail.answered, 0, memory_order_relaxed);
    state = NO_BUDGET;
    sequence = question = 0;
    unanswered_ns = 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (orders[gpu].open)
            orders[gpu].open = false;
}
