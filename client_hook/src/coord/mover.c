/* See mover.h. */
#include "coord/mover.h"

#include "base/process.h"
#include "base/system.h"
#include "coord/mailbox.h"
#include "gate/gate.h"
#include "inflight/pacing.h"
#include "memory/memory.h"

#include <string.h>
#include <sys/prctl.h>

#define RAISE_NS 100000000u /* how long a pass waits for a goal to rise */
#define NEWS_NS 20000000u
#define NEWS_BYTES (64u << 20)
#define DRAIN_BOUND_NS 1000000000u /* for work that a release left behind */
#define SLICE_NS 5000000u

typedef struct mover {
    uint32_t gpu;
    bool has_thread;        /* else the agent thread makes the passes: it answers questions, so that none may wait */
    /* Under the lock. */
    nvs_goal goal;          /* the newest */
    uint32_t goals, aimed_at; /* numbers of the newest, and of the newest that a pass has worked for */
    uint32_t heeded;        /* likewise: the newest that the pass knows */
    uint32_t rested;        /* likewise: the newest at which a waiting pass has come to rest */
    bool held, running;
    bool hurried;           /* the pass, or the next one, does not wait for its goal to rise */
    struct {
        bool out;
        bool lacks;           /* something did not fit below the goal */
        uint64_t from, moved; /* bytes on the GPU at its begin, and moved since */
        uint64_t told, told_ns;
    } pass;
    nvs_mover_state state;  /* without `busy`, `at_rest` and `heeds` */
    nvs_mover_state seen;   /* of the agent thread */
} mover;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "movers" in the lock order of base/base.h */
NVS_FORK_STATE static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
NVS_FORK_STATE static mover movers[NVS_MAX_GPUS];
NVS_FORK_STATE static uint32_t passes; /* that are under way */
NVS_FORK_STATE static bool stopping;

static bool is_busy(const mover *m) /* locked */
{
    return m->running || (!m->held && m->aimed_at != m->goals);
}

/* --- one pass --- */

/* Locked: how far the newest goal is ahead.  What comes in is chosen from all that is missing, so the pass works for each goal ahead; what goes
 * out was chosen for the goal at its begin. */
static uint64_t ahead(mover *m, uint64_t moved)
{
    const uint64_t goal = m->goal.bytes, from = m->pass.from;
    const uint64_t at = !m->pass.out ? from + moved : from > moved ? from - moved : 0;
    const bool over = stopping || m->held || m->rested == m->goals || (at < goal) == m->pass.out;
    const uint64_t left = over ? 0 : m->pass.out ? at - goal : goal - at;
    m->heeded = m->goals;
    if (left != 0 && !m->pass.out && !m->pass.lacks)
        m->aimed_at = m->goals;
    return left;
}

static bool may_rise(const mover *m, uint64_t moved) /* locked */
{
    return m->goal.rises && !m->hurried && !m->pass.lacks && !m->held && !stopping && m->goal.bytes >= m->pass.from + moved;
}

/* Locked: everything up to `moved` has moved. */
static void count(mover *m, uint64_t moved, bool tell)
{
    *(m->pass.out ? &m->state.out_bytes : &m->state.in_bytes) += moved - m->pass.moved;
    m->pass.moved = moved;
    if (tell || m->goal.rises) /* `left` may wait for it */
        pthread_cond_broadcast(&changed);
    if (tell) {
        const uint64_t now = nvs_now_ns();
        m->state.news++;
        m->state.moving_ns += now - m->pass.told_ns;
        m->pass.told = moved;
        m->pass.told_ns = now;
        nvs_agent_poke();
    }
}

static uint64_t left(void *argument, uint64_t moved, uint64_t least)
{
    mover *m = argument;
    const struct timespec until = nvs_wait_until(RAISE_NS);
    pthread_mutex_lock(&lock);
    uint64_t bytes = ahead(m, moved);
    while (bytes < least && may_rise(m, moved)) {
        if (m->pass.moved == moved && m->rested != m->goals) { /* all that has begun has come in */
            m->rested = m->goals;
            bytes = 0;
            count(m, moved, true);
        }
        if (nvs_cond_wait(&changed, &lock, &until) != 0)
            break;
        bytes = ahead(m, moved);
    }
    m->pass.lacks = m->pass.lacks || bytes < least;
    pthread_mutex_unlock(&lock);
    return bytes;
}

static void on_moved(void *argument, uint64_t moved)
{
    mover *m = argument;
    pthread_mutex_lock(&lock);
    count(m, moved, moved >= m->pass.told + NEWS_BYTES || nvs_now_ns() >= m->pass.told_ns + NEWS_NS);
    pthread_mutex_unlock(&lock);
}

/* The gate is closed already; a release may have left work behind that still runs. */
static bool drained(const mover *m)
{
    const uint64_t end = nvs_now_ns() + DRAIN_BOUND_NS;
    for (;;) {
        uint64_t now = nvs_now_ns(), slice = end < now + SLICE_NS ? end : now + SLICE_NS;
        if (nvs_gate_close(m->gpu, slice) == NVS_OK && nvs_drain_closed(m->gpu, slice) == NVS_OK)
            return true;
        pthread_mutex_lock(&lock);
        const bool go_on = !stopping && !m->held;
        pthread_mutex_unlock(&lock);
        if (!go_on || nvs_now_ns() >= end)
            return false;
    }
}

static uint32_t approach(mover *m, const nvs_watch *watch, uint64_t *moved)
{
    if (!drained(m))
        return CUDA_ERROR_NOT_READY;
    const uint64_t from = nvs_memory_resident(m->gpu);
    pthread_mutex_lock(&lock);
    m->aimed_at = m->goals;
    m->pass.from = from;
    m->pass.out = from > m->goal.bytes; /* this thread alone changes it */
    pthread_mutex_unlock(&lock);
    const nvs_status status = nvs_memory_move(m->gpu, m->pass.out, watch, moved);
    return status == NVS_OK ? 0 : status == NVS_NO_MEMORY ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_UNKNOWN;
}

/* Locked; unlocks meanwhile. */
static void make_pass(mover *m)
{
    const nvs_watch watch = {.moved = on_moved, .left = left, .argument = m, .promised = m->goal.promised,
                             .asks = !m->goal.promised && m->has_thread};
    uint64_t moved = 0;
    passes++;
    m->running = true;
    m->aimed_at = m->heeded = m->goals;
    m->pass.moved = m->pass.told = 0;
    m->pass.told_ns = nvs_now_ns();
    m->pass.lacks = false;
    pthread_mutex_unlock(&lock);
    const uint32_t error = approach(m, &watch, &moved);
    pthread_mutex_lock(&lock);
    m->state.error = error;
    m->running = false;
    passes--;
    count(m, moved, true);
}

static void *mover_main(void *argument)
{
    mover *m = argument;
    (void)prctl(PR_SET_NAME, "nvshare-mover", 0, 0, 0);
    pthread_mutex_lock(&lock);
    for (;;) {
        if (stopping || !is_busy(m))
            nvs_cond_wait(&changed, &lock, NULL);
        else
            make_pass(m);
    }
    return NULL;
}

/* --- the agent thread --- */

void nvs_mover_aim(uint32_t gpu, const nvs_goal *goal)
{
    mover *m = &movers[gpu];
    if (!m->has_thread) {
        m->gpu = gpu;
        m->has_thread = true; /* read by the thread once there is a goal */
        m->has_thread = nvs_thread_start(NULL, mover_main, m) == 0;
    }
    pthread_mutex_lock(&lock);
    m->goal = *goal;
    m->goals++;
    m->held = false;
    if (!m->running)
        m->hurried = !m->has_thread;
    m->state.error = 0;
    m->seen.busy = true;
    m->seen.at_rest = m->seen.heeds = false;
    pthread_cond_broadcast(&changed);
    if (!m->has_thread)
        make_pass(m);
    pthread_mutex_unlock(&lock);
}

void nvs_mover_hold(uint32_t gpu)
{
    pthread_mutex_lock(&lock);
    movers[gpu].held = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void nvs_mover_hurry(uint32_t gpu)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < NVS_MAX_GPUS; i++)
        if (movers[i].goals != 0 && (i == gpu || gpu == NVS_NO_GPU))
            movers[i].hurried = true;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

void nvs_movers_look(void)
{
    pthread_mutex_lock(&lock);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        mover *m = &movers[gpu];
        if (m->goals == 0)
            continue;
        m->seen = m->state;
        m->seen.busy = is_busy(m);
        m->seen.at_rest = !m->seen.busy || m->rested == m->goals;
        m->seen.heeds = !m->running || m->heeded == m->goals;
    }
    pthread_mutex_unlock(&lock);
}

const nvs_mover_state *nvs_mover_state_of(uint32_t gpu)
{
    return &movers[gpu].seen;
}

bool nvs_movers_stop(uint64_t patience_ns)
{
    const struct timespec until = nvs_wait_until(patience_ns);
    pthread_mutex_lock(&lock);
    stopping = true;
    pthread_cond_broadcast(&changed);
    while (passes != 0 && nvs_cond_wait(&changed, &lock, &until) == 0) {
    }
    const bool quiet = passes == 0;
    pthread_mutex_unlock(&lock);
    return quiet;
}

NVS_FORK_CODE void nvs_movers_after_fork(void)
{
    /* The goals and the threads were the parent's. */
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (movers[gpu].goals != 0)
            memset(&movers[gpu], 0, sizeof movers[gpu]);
    passes = 0;
    stopping = false;
}
