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

/* --- questions (mailbox.h) --- */

/* The number of the newest question; `open`: it has no answer. */
static uint32_t newest(nvs_question *of, bool *open)
{
    const uint32_t asked = atomic_load_explicit(&of->asked, memory_order_acquire); /* pairs with nvs_question_ask */
    *open = asked != atomic_load_explicit(&of->answered, memory_order_relaxed); /* only the agent writes it */
    return asked;
}

/* True: it answers the newest question that was sent, for the first time. */
static bool hears(nvs_question *of, uint32_t answers)
{
    const bool is_new = answers == of->sent && answers != of->heard;
    if (is_new)
        of->heard = answers;
    return is_new;
}

/* --- the share of the node's host memory --- */

#define ANSWER_NS 2000000000u

NVS_FORK_STATE static nvs_question mail = {.asking = PTHREAD_MUTEX_INITIALIZER};

/* Of the agent thread. */
NVS_FORK_STATE static bool bounded;            /* false: without a connection, or without answers */
NVS_FORK_STATE static uint32_t sequence;       /* number of the last State */
NVS_FORK_STATE static uint64_t unanswered_ns;  /* since when it has no answer; 0: it has */

/* An application's thread. */
void nvs_agent_reserve_host(uint64_t total_bytes)
{
    int saved = errno;
    if (atomic_load_explicit(&nvs_agent_connected, memory_order_relaxed) != 0) /* a hint: without a connection nobody answers */
        (void)nvs_question_ask(&mail, total_bytes, 0);
    errno = saved;
}

static void send(uint64_t bytes)
{
    NVS_LINK_SEND(state, .gpu = NVS_WIRE_HOST, .asks = ++sequence, .total_bytes = bytes);
    unanswered_ns = nvs_now_ns();
}

static void set_share(bool known, uint64_t bytes)
{
    bounded = known;
    unanswered_ns = 0;
    nvs_host_set_share(known, bytes);
    nvs_question_answer(&mail, mail.sent, UINT64_MAX); /* host/pool.h has the answer */
}

void nvs_budget_connected(void)
{
    if (!nvs_swapping())
        return;
    set_share(true, 0); /* allocations before the answer ask too */
    send(nvs_host_share_in_use());
}

void nvs_budget_received(const nvs_target *target)
{
    if (bounded && target->answers == sequence) /* else a newer one is under way */
        set_share(true, target->total_bytes);
}

bool nvs_budget_spare(void)
{
    uint64_t keep = UINT64_MAX;
    const bool again = bounded && (unanswered_ns != 0 || nvs_host_spare_share(&keep));
    if (keep != UINT64_MAX)
        send(keep);
    return again;
}

uint64_t nvs_budget_serve(uint64_t now_ns)
{
    const uint32_t asked = atomic_load_explicit(&mail.asked, memory_order_acquire); /* pairs with nvs_question_ask */
    if (asked != mail.sent) {
        mail.sent = asked;
        if (bounded)
            send(atomic_load_explicit(&mail.bytes, memory_order_relaxed)); /* the acquire above */
        else
            set_share(false, 0);
    }
    if (unanswered_ns == 0)
        return UINT64_MAX;
    if (now_ns < unanswered_ns + ANSWER_NS)
        return unanswered_ns + ANSWER_NS;
    nvs_log(NVS_LOG_INFO, "no answer about host memory; going on without a budget");
    set_share(false, 0);
    return UINT64_MAX;
}

/* --- states and targets --- */

/* At most one State in that time, unless memory moves.  In mode `device` none does, and the coordinator acts upon no figure. */
#define STATE_NS (nvs_config.memory_mode == NVS_MODE_DEVICE ? 100000000u : 10000000u)

/* Of the agent thread, and of this connection. */
static struct told {
    uint32_t target;        /* number of the newest one */
    uint32_t heeded;        /* number of the newest that the mover knows: an older one is not obeyed any more */
    bool obeyed;            /* the mover works for it */
    uint32_t error;         /* why it came to rest */
    uint64_t sent_ns;       /* the last State */
    uint32_t news;          /* the mover's, of the last State */
    nvs_mover_state before; /* the mover's, at AttachGpu */
} told[NVS_MAX_GPUS];

void nvs_state_attached(uint32_t gpu)
{
    const nvs_mover_state *its = nvs_mover_state_of(gpu);
    nvs_question *reserve = &nvs_mail[gpu].reserve, *pins = &nvs_mail[gpu].pins;
    told[gpu] = (struct told){.news = its->news, .before = *its};
    reserve->sent = reserve->heard = pins->sent = pins->heard = 0;
}

void nvs_state_send(uint32_t gpu)
{
    const nvs_mover_state *its = nvs_mover_state_of(gpu);
    struct told *mine = &told[gpu];
    nvs_question *reserve = &nvs_mail[gpu].reserve, *pins = &nvs_mail[gpu].pins;
    nvs_usage usage;
    bool asks, asks_pins;
    /* seq_cst: the flag goes before the figures are read, see nvs_agent_memory_changed */
    (void)atomic_exchange_explicit(&nvs_ledgers[gpu].to_report, 0, memory_order_seq_cst);
    nvs_memory_usage(gpu, &usage);
    mine->sent_ns = nvs_now_ns();
    mine->news = its->news;
    reserve->sent = newest(reserve, &asks);
    const uint32_t asked_pins = newest(pins, &asks_pins);
    if (asks_pins) /* an answer of an earlier connection says nothing to this coordinator */
        pins->sent = asked_pins;
    /* Relaxed: newest() acquires the questions; for the others see their declarations. */
    const uint64_t total = atomic_load_explicit(asks ? &reserve->bytes : &nvs_ledgers[gpu].quota.reserved, memory_order_relaxed);
    NVS_LINK_SEND(state, (uint8_t)gpu, mine->heeded, usage.allocated_bytes, usage.resident_bytes, usage.pinned_bytes, usage.host_bytes,
                  atomic_load_explicit(&nvs_mail[gpu].released_bytes, memory_order_relaxed), nvs_host_ready_bytes(),
                  nvs_gate_linked_with(gpu) != UINT32_C(1) << gpu, its->out_bytes - mine->before.out_bytes,
                  its->in_bytes - mine->before.in_bytes, its->moving_ns - mine->before.moving_ns, !mine->obeyed || its->at_rest,
                  mine->error, reserve->sent, total, asks ? atomic_load_explicit(&reserve->lacking, memory_order_relaxed) : 0, pins->sent,
                  atomic_load_explicit(&pins->bytes, memory_order_relaxed));
}

uint64_t nvs_state_due(uint32_t gpu)
{
    nvs_question *reserve = &nvs_mail[gpu].reserve, *pins = &nvs_mail[gpu].pins;
    bool asks, asks_pins;
    if (newest(reserve, &asks) != reserve->sent || (newest(pins, &asks_pins) != pins->sent && asks_pins) ||
        told[gpu].news != nvs_mover_state_of(gpu)->news)
        return 0;
    /* seq_cst: pairs with the exchange above */
    return atomic_load_explicit(&nvs_ledgers[gpu].to_report, memory_order_seq_cst) != 0 ? told[gpu].sent_ns + STATE_NS : UINT64_MAX;
}

void nvs_target_received(const nvs_target *target, bool leased)
{
    struct told *mine = &told[target->gpu];
    nvs_question *reserve = &nvs_mail[target->gpu].reserve, *pins = &nvs_mail[target->gpu].pins;
    if (hears(reserve, target->answers)) {
        atomic_store_explicit(&nvs_ledgers[target->gpu].quota.limited, target->by_limit, memory_order_relaxed); /* see memory/quota.h */
        nvs_memory_set_reserved(target->gpu, target->total_bytes);
        nvs_question_answer(reserve, target->answers, target->total_bytes);
    }
    if (hears(pins, target->answers_pins))
        nvs_question_answer(pins, target->answers_pins, target->pins_bytes);
    if (target->number <= mine->target)
        return; /* nothing is new but the answers */
    if (target->bytes < nvs_memory_resident(target->gpu))
        (void)atomic_fetch_add_explicit(&nvs_pressure_times, 1, memory_order_relaxed); /* see its declaration */
    mine->target = target->number;
    mine->obeyed = !leased;
    mine->error = leased ? CUDA_ERROR_NOT_PERMITTED : 0;
    if (!leased) {
        nvs_mover_aim(target->gpu, &(nvs_goal){.bytes = target->bytes, .rises = target->rises, .promised = true});
        return;
    }
    mine->heeded = target->number;
    nvs_state_send(target->gpu);
}

void nvs_targets_look(void)
{
    nvs_movers_look();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        const nvs_mover_state *its = nvs_mover_state_of(gpu);
        if (its->heeds)
            told[gpu].heeded = told[gpu].target;
        if (told[gpu].obeyed && !its->busy) {
            told[gpu].obeyed = false;
            told[gpu].error = its->error;
        }
    }
}

void nvs_states_lost(void)
{
    set_share(false, 0);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (told[gpu].obeyed)
            nvs_mover_hold(gpu);
}

NVS_FORK_CODE void nvs_state_after_fork(void)
{
    mail = (nvs_question){.asking = PTHREAD_MUTEX_INITIALIZER}; /* a thread that does not exist here may have held it */
    bounded = false;
    sequence = 0;
    unanswered_ns = 0;
}
