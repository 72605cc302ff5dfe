/* Pacing: see pacing.h.
 *
 * Each thread keeps a queue with events for each stream that it submits to (stream.h).  This file decides when a queue is checked, and with
 * what budget.
 *
 * Beside other programs every submission is counted.  A program that is alone on the GPU must not be slowed, yet the next program waits for
 * its queue.  So only one submission in `stride` (and every graph) is counted, for all since the one before, on any stream, and events are few.
 *
 * Threads share the budget of their GPU, and streams share their thread's: their pending work may have to run one after the other.
 *
 * Pacing pauses while any stream of the process is captured.  It runs in relaxed capture mode, so that it does not invalidate a capture that
 * begins in another thread meanwhile.  The events of a destroyed context end with it: nvs_pacing_context_gone() makes every thread forget them.
 *
 * The driver may not be called while a thread is torn down, so records of ended threads wait in a list.  A later check by any thread destroys
 * their events inside a visit to each context, which therefore cannot end meanwhile.
 */
#include "inflight/pacing.h"

#include "base/process.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "inflight/captures.h"
#include "inflight/stream.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

enum {
    STREAMS = 16,        /* streams that a thread remembers; a new one replaces the least recently used */
    LONE_STRIDE = 61,    /* coprime to likely numbers of streams that a program uses in turns */
    IDLE_STRIDE = 251,   /* the same while checks find no pending work */
    UNPACED_STRIDE = 1024, /* for a GPU without pacing */
    RECENT = 256,        /* checks of a thread after which an unused stream no longer counts as busy */
    GONE = 64,           /* ended contexts that are remembered: a thread that has missed more forgets all its events */
    ENDED_AT_ONCE = 2,   /* records of ended threads that one check removes: more than one, so that the list cannot grow */
    WINDOW_BITS = 24,    /* 17 ms: a thread without a check in this window or the one before does not share the budget */
};
#define DEFAULT_BUDGET_NS 10000000u /* of a program that is alone, before the coordinator has set one */
#define LONE_GAP_NS 4000000u        /* minimum time between checks: very short calls are not worth a check each thousand */
#define IDLE_GAP_NS 32000000u       /* the same while checks find no pending work: a check takes up to 20 us with cold caches, and the
                                       driver's queue holds at most 1024 launches */

typedef struct pace_thread {
    struct pace_thread *next; /* in the list of ended threads */
    uint32_t generation;
    uint32_t stride;    /* while alone */
    uint32_t synchronized; /* its own waits for its work */
    uint64_t clock;     /* checks */
    uint64_t each_ns;   /* the last estimate: the initial one of a new stream */
    uint32_t window[NVS_MAX_GPUS]; /* in which it was last counted on a GPU */
    nvs_pace_stream *last;
    nvs_pace_costs costs;
    nvs_pace_stream streams[STREAMS];
} pace_thread;

NVS_FORK_STATE static _Atomic uint64_t budgets[NVS_MAX_GPUS];      /* 0: the program is alone */
NVS_FORK_STATE static _Atomic uint64_t lone_budgets[NVS_MAX_GPUS]; /* 0: not managed (yet): not paced */
NVS_FORK_STATE static _Atomic uint64_t crowds[NVS_MAX_GPUS];       /* window, threads in the window before, threads in this one: 32, 16, 16 bits */
NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "ended threads" in the lock order of base/base.h: of the next three */
static _Atomic uint32_t generation; /* grows when a context has ended */
static CUcontext gone[GONE];        /* of each generation: the context that ended */
NVS_FORK_STATE static _Atomic(pace_thread *) ended; /* relaxed: read without the lock first, and again with it */
static _Thread_local pace_thread *mine __attribute__((tls_model("initial-exec")));
static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static bool key_made;

static bool has_events(const pace_thread *thread)
{
    bool has = false;
    for (unsigned i = 0; i < STREAMS; i++)
        has |= nvs_pace_stream_has_events(&thread->streams[i]);
    return has;
}

static void thread_ends(void *argument)
{
    pace_thread *thread = argument;
    mine = NULL;
    if (!has_events(thread)) {
        free(thread);
        return;
    }
    pthread_mutex_lock(&lock);
    thread->next = atomic_load_explicit(&ended, memory_order_relaxed);
    atomic_store_explicit(&ended, thread, memory_order_relaxed); /* see its declaration */
    pthread_mutex_unlock(&lock);
}

static void make_key(void) { key_made = pthread_key_create(&key, thread_ends) == 0; }

static pace_thread *make_thread(void)
{
    pace_thread *thread;
    (void)pthread_once(&key_once, make_key);
    if (!key_made || (thread = calloc(1, sizeof *thread)) == NULL)
        return NULL;
    if (pthread_setspecific(key, thread) != 0) {
        free(thread);
        return NULL;
    }
    thread->stride = NVS_FIRST_STRIDE;
    thread->generation = atomic_load_explicit(&generation, memory_order_acquire); /* as in outdated() */
    return mine = thread;
}

/* Locked.  True: the context of these events has ended since that generation, or is not known. */
static bool lost(const nvs_pace_stream *entry, uint32_t since)
{
    const uint32_t now = atomic_load_explicit(&generation, memory_order_relaxed); /* changes under the lock */
    const CUcontext context = nvs_pace_stream_context(entry);
    bool found = now - since > GONE || context == NULL;
    for (uint32_t each = since + 1; !found && each != now + 1; each++)
        found = gone[each % GONE] == context;
    return found;
}

/* Forgets the events of ended contexts. */
static void catch_up(pace_thread *thread)
{
    pthread_mutex_lock(&lock);
    for (unsigned i = 0; i < STREAMS; i++)
        if (lost(&thread->streams[i], thread->generation))
            thread->streams[i] = (nvs_pace_stream){.stream = NULL};
    thread->generation = atomic_load_explicit(&generation, memory_order_relaxed); /* as above */
    pthread_mutex_unlock(&lock);
    thread->last = NULL;
    thread->stride = NVS_FIRST_STRIDE;
}

static bool outdated(const pace_thread *thread)
{
    return thread->generation != atomic_load_explicit(&generation, memory_order_acquire); /* pairs with nvs_pacing_context_gone */
}

static pace_thread *my_thread(void)
{
    pace_thread *thread = mine;
    if (thread == NULL && (thread = make_thread()) == NULL)
        return NULL;
    if (outdated(thread))
        catch_up(thread);
    return thread;
}

/* --- ended threads --- */

static bool destroy_events(CUcontext context, void *argument)
{
    pace_thread *thread = argument;
    if (outdated(thread)) /* the handle may be that of another context by now */
        catch_up(thread);
    for (unsigned i = 0; i < STREAMS; i++) {
        nvs_pace_stream *entry = &thread->streams[i];
        if (nvs_pace_stream_context(entry) != context)
            continue;
        nvs_pace_stream_drop(entry);
        *entry = (nvs_pace_stream){.stream = NULL};
    }
    return true;
}

static pace_thread *take_ended(void)
{
    if (NVS_LIKELY(atomic_load_explicit(&ended, memory_order_relaxed) == NULL)) /* see its declaration */
        return NULL;
    pthread_mutex_lock(&lock);
    pace_thread *thread = atomic_load_explicit(&ended, memory_order_relaxed); /* as above */
    if (thread != NULL)
        atomic_store_explicit(&ended, thread->next, memory_order_relaxed); /* as above */
    pthread_mutex_unlock(&lock);
    return thread;
}

/* Events in a context that is not visited end with it. */
static void remove_ended(void)
{
    pace_thread *thread;
    for (unsigned count = 0; count < ENDED_AT_ONCE && (thread = take_ended()) != NULL; count++) {
        uint32_t gpus = 0;
        for (unsigned i = 0; i < STREAMS; i++)
            if (nvs_pace_stream_has_events(&thread->streams[i]))
                gpus |= 1u << thread->streams[i].gpu;
        for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
            if ((gpus >> gpu & 1) != 0)
                (void)nvs_each_context(gpu, destroy_events, thread);
        free(thread);
    }
}

static nvs_pace_stream *my_stream(pace_thread *thread, uint32_t gpu, CUstream stream, CUcontext context)
{
    nvs_pace_stream *oldest = &thread->streams[0], *entry = thread->last;
    thread->clock++;
    if (NVS_LIKELY(entry != NULL && entry->stream == stream && entry->context == context && entry->gpu == gpu))
        return entry;
    if (entry != NULL)
        entry->used = thread->clock;
    for (unsigned i = 0; i < STREAMS; i++) {
        entry = &thread->streams[i];
        if (entry->stream == stream && entry->context == context && entry->gpu == gpu)
            return thread->last = entry;
        if (entry->used < oldest->used)
            oldest = entry;
    }
    nvs_pace_stream_drop(oldest);
    *oldest = (nvs_pace_stream){.stream = stream, .context = context, .gpu = gpu,
                                .estimate = {.each_ns = thread->each_ns, .guessed = thread->each_ns != 0}};
    return thread->last = oldest;
}

/* --- shares --- */

/* How many threads have submitted in this window or the one before, this one included.  Relaxed: figures that order nothing else. */
static uint64_t crowd(pace_thread *thread, uint32_t gpu, uint64_t now_ns)
{
    const uint32_t window = (uint32_t)(now_ns >> WINDOW_BITS);
    uint64_t seen = atomic_load_explicit(&crowds[gpu], memory_order_relaxed), next, before, here;
    do {
        const uint32_t age = window - (uint32_t)(seen >> 32);
        before = age == 0 ? seen >> 16 & 0xffff : age == 1 ? seen & 0xffff : 0;
        here = age == 0 ? seen & 0xffff : 0;
        if (thread->window[gpu] == window)
            break;
        here += here < 0xffff;
        next = (uint64_t)window << 32 | before << 16 | here;
    } while (!atomic_compare_exchange_weak_explicit(&crowds[gpu], &seen, next, memory_order_relaxed, memory_order_relaxed));
    thread->window[gpu] = window;
    return before > here ? before : here > 0 ? here : 1;
}

static bool in_use(const pace_thread *thread, const nvs_pace_stream *entry)
{
    return entry->pending.count > 0 && thread->clock - entry->used < RECENT;
}

/* The number of streams of all threads that share the budget. */
static uint64_t parts(pace_thread *thread, const nvs_pace_stream *checked, uint64_t now_ns)
{
    uint64_t busy = 1;
    for (unsigned i = 0; i < STREAMS; i++) {
        const nvs_pace_stream *entry = &thread->streams[i];
        busy += entry != checked && entry->gpu == checked->gpu && in_use(thread, entry);
    }
    return busy * crowd(thread, checked->gpu, now_ns);
}

/* While alone, the stream with the longest kernels determines the next check of this thread. */
static void choose_stride(pace_thread *thread, const nvs_pace_stream *checked)
{
    const uint32_t longest = checked->idle.checks == NVS_PACE_IDLE ? IDLE_STRIDE : LONE_STRIDE;
    thread->stride = checked->due.every < longest ? checked->due.every : longest;
    for (unsigned i = 0; i < STREAMS; i++) {
        const nvs_pace_stream *entry = &thread->streams[i];
        if (in_use(thread, entry) && entry->due.every < thread->stride)
            thread->stride = entry->due.every;
    }
}

/* Records an event, and waits if too much is pending. */
static __attribute__((noinline)) void check(pace_thread *thread, nvs_pace_stream *entry, nvs_pace_terms *now)
{
    if (nvs_capturing()) {
        nvs_pace_stream_nothing_since(entry); /* captured work does not run now */
        return;
    }
    if (now->now_ns == 0)
        now->now_ns = nvs_now_ns();
    const uint64_t gap_ns = entry->idle.checks == NVS_PACE_IDLE ? IDLE_GAP_NS : LONE_GAP_NS;
    if (now->lone && nvs_pace_stream_rare(entry) && now->now_ns - entry->checked_ns < gap_ns)
        return; /* the clock is read again after the next stride */
    entry->checked_ns = now->now_ns;
    now->parts = parts(thread, entry, now->now_ns);
    now->budget_ns /= now->parts;
    now->costs = &thread->costs;
    const int saved = errno;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    nvs_pace_stream_check(entry, thread->synchronized, now);
    thread->each_ns = entry->estimate.each_ns;
    choose_stride(thread, entry);
    remove_ended();
    if (exchanged)
        (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    errno = saved;
}

/* Any submission. */
static __attribute__((noinline)) void after(nvs_slot *slot, uint32_t gpu, CUstream stream, uint64_t what)
{
    nvs_pace_terms now = {.budget_ns = atomic_load_explicit(&budgets[gpu], memory_order_relaxed)}; /* orders nothing else */
    if (now.budget_ns == 0) {
        now.lone = true;
        now.budget_ns = atomic_load_explicit(&lone_budgets[gpu], memory_order_relaxed); /* as above */
    }
    pace_thread *thread = now.budget_ns == 0 ? NULL : my_thread();
    if (thread == NULL) {
        (void)nvs_gate_unseen(slot, UNPACED_STRIDE);
        return;
    }
    CUcontext context = NULL;
    /* Every other check comes one submission later, so that streams used in turns are all sampled. */
    const uint32_t unseen = nvs_gate_unseen(slot, now.lone ? thread->stride + (thread->clock & 1) : 1);
    if ((stream == CU_STREAM_PER_THREAD || stream == CU_STREAM_LEGACY) && /* relaxed: see base/hot.h */
        (context = atomic_load_explicit(&nvs_hot.only_context, memory_order_relaxed)) == NULL &&
        NVS_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return;
    nvs_pace_stream *entry = my_stream(thread, gpu, stream, context);
    if (NVS_UNLIKELY(entry->due.lone != now.lone || entry->due.every == 0) && entry->due.every != NVS_PACE_RETRY)
        nvs_pace_stream_choose_every(entry, &now);
    entry->due.since += unseen;
    if (now.lone && entry->idle.checks == NVS_PACE_IDLE)
        nvs_pace_stream_visited(entry, unseen, now.now_ns = nvs_now_ns());
    bool due = entry->due.since >= entry->due.every;
    if (!now.lone)
        due |= nvs_pace_stream_add(entry, what, &thread->costs);
    if (NVS_UNLIKELY(due))
        check(thread, entry, &now);
}

/* Fast path beside other programs: the submission goes to the same stream as the last one, and is only counted.  False: not applicable. */
static inline bool counted(nvs_slot *slot, uint32_t gpu, CUstream stream, uint64_t what)
{
    pace_thread *thread = mine;
    nvs_pace_stream *entry = NVS_LIKELY(thread != NULL) ? thread->last : NULL;
    nvs_pace_terms now = {.budget_ns = atomic_load_explicit(&budgets[gpu], memory_order_relaxed)}; /* orders nothing else */
    if (NVS_UNLIKELY(entry == NULL) || NVS_UNLIKELY(now.budget_ns == 0) || NVS_UNLIKELY(entry->due.lone) || NVS_UNLIKELY(entry->due.every == 0) ||
        NVS_UNLIKELY(entry->stream != stream) || NVS_UNLIKELY(entry->gpu != gpu) ||
        NVS_UNLIKELY(outdated(thread)) ||
        NVS_UNLIKELY(entry->context != NULL && /* relaxed: see base/hot.h */
                     entry->context != atomic_load_explicit(&nvs_hot.only_context, memory_order_relaxed)))
        return false;
    thread->clock++;
    entry->due.since += nvs_gate_unseen(slot, 1);
    if (NVS_UNLIKELY(nvs_pace_stream_add(entry, what, &thread->costs)) || NVS_UNLIKELY(entry->due.since >= entry->due.every))
        check(thread, entry, &now);
    return true;
}

void nvs_pace_after(uint32_t gpu, CUstream stream, uint64_t what)
{
    nvs_slot *slot = nvs_self;
    if (NVS_UNLIKELY(gpu == NVS_NO_GPU) || NVS_UNLIKELY(slot == NULL))
        return;
    if (!counted(slot, gpu, stream, what))
        after(slot, gpu, stream, what);
}

void nvs_pace_synchronized(void)
{
    if (mine != NULL)
        mine->synchronized++;
}

void nvs_pacing_set_budget(uint32_t gpu, uint64_t budget_ns, uint64_t most_ns)
{
    /* Relaxed: each orders nothing else. */
    if (budget_ns != 0)
        atomic_store_explicit(&lone_budgets[gpu], budget_ns, memory_order_relaxed);
    else if (atomic_load_explicit(&lone_budgets[gpu], memory_order_relaxed) == 0)
        atomic_store_explicit(&lone_budgets[gpu], DEFAULT_BUDGET_NS, memory_order_relaxed);
    if (most_ns != 0 && (budget_ns == 0 || budget_ns > most_ns))
        budget_ns = most_ns;
    atomic_store_explicit(&budgets[gpu], budget_ns, memory_order_relaxed);
}

void nvs_pacing_context_gone(CUcontext context)
{
    pthread_mutex_lock(&lock);
    const uint32_t next = atomic_load_explicit(&generation, memory_order_relaxed) + 1; /* changes under the lock */
    gone[next % GONE] = context;
    atomic_store_explicit(&generation, next, memory_order_release); /* pairs with outdated() */
    pthread_mutex_unlock(&lock);
}

NVS_FORK_CODE void nvs_pacing_after_fork(void)
{
    nvs_pace_stream_after_fork();
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    atomic_store_explicit(&ended, NULL, memory_order_relaxed); /* the parent's events, as the next */
    if (mine != NULL)
        mine->generation -= GONE + 1; /* so that the record counts as without events when this thread ends */
    mine = NULL;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        atomic_store_explicit(&budgets[gpu], 0, memory_order_relaxed);
        atomic_store_explicit(&lone_budgets[gpu], 0, memory_order_relaxed);
        atomic_store_explicit(&crowds[gpu], 0, memory_order_relaxed);
    }
}
