/* See moves.h. */
#include "coord/moves.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "coord/mailbox.h"
#include "coord/protocol/link.h"
#include "gate/gate.h"
#include "host/pool.h"
#include "inflight/pacing.h"
#include "memory/memory.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

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

NVS_FORK_CODE void nvs_budget_after_fork(void)
{
    pthread_mutex_init(&mail.asking, NULL); /* a thread that does not exist here may have held it */
    atomic_store_explicit(&mail.asked, 0, memory_order_relaxed);
    atomic_store_explicit(&mail.answered, 0, memory_order_relaxed);
    state = NO_BUDGET;
    sequence = question = 0;
    unanswered_ns = 0;
}

/* --- orders --- */

#define PROGRESS_NS 20000000u
#define PROGRESS_BYTES (64u << 20)
#define DRAIN_BOUND_NS 1000000000u /* for work that a release left behind */
#define SLICE_NS 5000000u

typedef struct order {
    struct order *next;
    nvs_move_order as; /* `credit_bytes` under the lock */
    /* Under the lock. */
    struct {         /* the mover writes it */
        uint64_t moved_bytes, elapsed_ns;
        uint32_t error; /* CUresult; 0: none */
    } result;
    bool report;     /* `result` is to be reported */
    bool running, ended;
    bool on_mover;   /* not on the agent thread, which answers questions */
    bool hurried;    /* does not wait for room any more */
    bool abandoned;  /* ends as soon as possible, without an answer */
    uint64_t began_ns, reported_ns, reported_bytes; /* the start, and the last report */
} order;

typedef struct queue {
    order *first, *last; /* unanswered, oldest first; the agent thread changes them under the lock */
    bool has_mover;
} queue;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "moves" in the lock order of base/base.h */
NVS_FORK_STATE static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
NVS_FORK_STATE static queue queues[NVS_MAX_GPUS];
NVS_FORK_STATE static bool stopping;

/* --- a mover --- */

static void on_moved(void *argument, uint64_t moved_bytes)
{
    order *o = argument;
    uint64_t now = nvs_now_ns();
    pthread_mutex_lock(&lock);
    o->result.moved_bytes = moved_bytes;
    bool report = moved_bytes >= o->reported_bytes + PROGRESS_BYTES || now >= o->reported_ns + PROGRESS_NS;
    if (report) {
        o->result.elapsed_ns = now - o->began_ns;
        o->report = true;
        o->reported_bytes = moved_bytes;
        o->reported_ns = now;
    }
    pthread_mutex_unlock(&lock);
    if (report)
        nvs_agent_poke();
}

static bool may_go_on(const order *o) /* locked */
{
    return !stopping && !o->abandoned;
}

static bool has_room(void *argument, uint64_t bytes, bool wait)
{
    order *o = argument;
    pthread_mutex_lock(&lock);
    while (wait && may_go_on(o) && !o->hurried && o->as.credit_bytes < bytes)
        nvs_cond_wait(&changed, &lock, NULL);
    bool has = may_go_on(o) && o->as.credit_bytes >= bytes;
    pthread_mutex_unlock(&lock);
    return has;
}

/* The gate is closed already; a release may have left work behind that still runs. */
static bool drained(const order *o)
{
    const uint32_t gpu = o->as.gpu;
    const uint64_t end = nvs_now_ns() + DRAIN_BOUND_NS;
    for (;;) {
        uint64_t now = nvs_now_ns(), slice = end < now + SLICE_NS ? end : now + SLICE_NS;
        if (nvs_gate_close(gpu, slice) == NVS_OK && nvs_drain_closed(gpu, slice) == NVS_OK)
            return true;
        pthread_mutex_lock(&lock);
        bool go_on = may_go_on(o);
        pthread_mutex_unlock(&lock);
        if (!go_on || nvs_now_ns() >= end)
            return false;
    }
}

static void carry_out(order *o)
{
    const bool own = o->as.order_id == 0;
    const nvs_watch watch = {.moved = on_moved, .room = has_room, .argument = o, .promised = !own, .asks = own && o->on_mover};
    uint64_t moved = 0;
    uint32_t error = 0;
    pthread_mutex_lock(&lock);
    o->began_ns = o->reported_ns = nvs_now_ns();
    o->running = true;
    pthread_mutex_unlock(&lock);
    if (!drained(o)) {
        error = CUDA_ERROR_NOT_READY;
    } else {
        nvs_status status = o->as.out ? nvs_memory_evict(o->as.gpu, o->as.bytes, &watch, &moved)
                                      : nvs_memory_restore(o->as.gpu, o->as.bytes, &watch, &moved);
        if (status != NVS_OK)
            error = status == NVS_NO_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
    }
    pthread_mutex_lock(&lock);
    o->result.moved_bytes = moved;
    o->result.error = error;
    o->result.elapsed_ns = nvs_now_ns() - o->began_ns;
    o->ended = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    nvs_agent_poke();
}

static order *oldest_open(const queue *at) /* locked */
{
    order *o = at->first;
    while (o != NULL && o->ended)
        o = o->next;
    return o;
}

static void *mover(void *argument)
{
    queue *mine = argument;
    (void)prctl(PR_SET_NAME, "nvshare-mover", 0, 0, 0);
    pthread_mutex_lock(&lock);
    for (;;) {
        order *o = stopping ? NULL : oldest_open(mine);
        if (o == NULL) {
            nvs_cond_wait(&changed, &lock, NULL);
            continue;
        }
        pthread_mutex_unlock(&lock);
        carry_out(o); /* not freed before it has ended */
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

static bool have_mover(queue *mine)
{
    if (!mine->has_mover)
        mine->has_mover = nvs_thread_start(NULL, mover, mine) == 0;
    return mine->has_mover;
}

/* --- the agent thread --- */

static void refuse(const nvs_move_order *as, uint32_t error)
{
    if (as->order_id != 0)
        NVS_LINK_SEND(move_progress, (uint8_t)as->gpu, as->order_id, 0, 0, true, error);
    else
        as->done(as->gpu, 0, error);
}

void nvs_moves_begin(const nvs_move_order *as)
{
    queue *mine = &queues[as->gpu];
    order *o = calloc(1, sizeof *o);
    if (o == NULL) {
        refuse(as, CUDA_ERROR_OUT_OF_MEMORY);
        return;
    }
    o->as = *as;
    if (as->out)
        o->as.credit_bytes = UINT64_MAX;
    bool own_thread = have_mover(mine);
    pthread_mutex_lock(&lock);
    for (order *at = mine->first; at != NULL; at = at->next)
        at->hurried = true;
    *(mine->last != NULL ? &mine->last->next : &mine->first) = o;
    mine->last = o;
    o->hurried = !own_thread;
    o->on_mover = own_thread;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    if (!own_thread)
        carry_out(o); /* on the agent thread */
}

void nvs_moves_credit(uint32_t gpu, uint64_t order_id, uint64_t credit_bytes)
{
    pthread_mutex_lock(&lock);
    for (order *o = queues[gpu].first; o != NULL; o = o->next)
        if (o->as.order_id == order_id && order_id != 0 && o->as.credit_bytes < credit_bytes)
            o->as.credit_bytes = credit_bytes;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void nvs_moves_hurry(uint32_t gpu)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < NVS_MAX_GPUS; i++)
        for (order *o = i == gpu || gpu == NVS_NO_GPU ? queues[i].first : NULL; o != NULL; o = o->next)
            o->hurried = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

bool nvs_moves_busy(uint32_t gpu)
{
    return queues[gpu].first != NULL; /* changed by this thread alone */
}

void nvs_moves_abandon(void)
{
    pthread_mutex_lock(&lock);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        for (order *o = queues[gpu].first; o != NULL; o = o->next)
            o->abandoned = o->abandoned || o->as.order_id != 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void nvs_moves_abandon_own(uint32_t gpu)
{
    pthread_mutex_lock(&lock);
    for (order *o = queues[gpu].first; o != NULL; o = o->next)
        o->abandoned = o->abandoned || o->as.order_id == 0;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

/* Takes the oldest order off if it has ended; else copies its figures to `report`. */
static order *take_ended(queue *mine, order *report)
{
    pthread_mutex_lock(&lock);
    order *o = mine->first;
    *report = *o;
    o->report = false;
    if (o->ended) {
        mine->first = o->next;
        if (mine->first == NULL)
            mine->last = NULL;
    } else {
        o = NULL;
    }
    pthread_mutex_unlock(&lock);
    return o;
}

static void answer(uint32_t gpu, const order *o)
{
    nvs_report_memory(gpu, nvs_now_ns());
    if (o->as.order_id == 0)
        o->as.done(gpu, o->result.moved_bytes, o->result.error);
    else if (!o->abandoned)
        NVS_LINK_SEND(move_progress, (uint8_t)gpu, o->as.order_id, o->result.moved_bytes, o->result.elapsed_ns, true, o->result.error);
}

void nvs_moves_serve(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        while (queues[gpu].first != NULL) {
            order report;
            order *ended = take_ended(&queues[gpu], &report);
            if (ended == NULL) {
                if (report.report && report.as.order_id != 0 && !report.abandoned)
                    NVS_LINK_SEND(move_progress, (uint8_t)gpu, report.as.order_id, report.result.moved_bytes, report.result.elapsed_ns, false, 0);
                break;
            }
            answer(gpu, ended);
            free(ended);
        }
    }
}

static bool any_running(void) /* locked */
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        const order *o = oldest_open(&queues[gpu]);
        if (o != NULL && o->running)
            return true;
    }
    return false;
}

bool nvs_moves_stop(uint64_t patience_ns)
{
    const struct timespec until = nvs_wait_until(patience_ns);
    pthread_mutex_lock(&lock);
    stopping = true;
    pthread_cond_broadcast(&changed);
    while (any_running() && nvs_cond_wait(&changed, &lock, &until) == 0) {
    }
    bool quiet = !any_running();
    pthread_mutex_unlock(&lock);
    return quiet;
}

NVS_FORK_CODE void nvs_moves_after_fork(void)
{
    /* The orders and the movers were the parent's. */
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
    memset(queues, 0, sizeof queues);
    stopping = false;
}
