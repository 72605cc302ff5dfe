/* See stream.h.
 *
 * Every wait has a deadline: the work may depend on a submission that this thread would make next, to another GPU or stream.  After a wait
 * that timed out, the thread waits for that stream again only when its oldest event is done, and half as long.  A wait ends when a host
 * function runs, which may wait for this thread.
 *
 * A program that is alone gets a larger budget step by step (`relief`) when the GPU fell idle after pacing had made the thread wait, unless the
 * thread waited for its work by itself: such a program needs to run ahead.
 *
 * Estimates: stretches are measured long after their estimate, and many are pending at once.  Each is compared with its present estimate: otherwise each
 * pending stretch would correct the same error again.
 */
#include "inflight/stream.h"

#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/host_functions.h"

#include <stdatomic.h>

#define LEAST_NS 500u        /* the shortest kernels take longer */
#define MOST_NS 4000000000u
#define MOST_AT_ONCE 16.0    /* largest correction factor: one measurement may be an outlier */

static uint32_t clamp(double ns)
{
    return ns < LEAST_NS ? LEAST_NS : ns > MOST_NS ? MOST_NS : (uint32_t)ns;
}

/* Takes one kind out of the set; NVS_PACE_KINDS: it is empty. */
static unsigned take(nvs_pace_set *kinds)
{
    for (unsigned word = 0; word < NVS_PACE_SET_WORDS; word++) {
        const uint64_t bits = kinds->bits[word];
        kinds->bits[word] = bits & (bits - 1);
        if (bits != 0)
            return 64 * word + (unsigned)__builtin_ctzll(bits);
    }
    return NVS_PACE_KINDS;
}

/* The sum of the kinds' estimates.  Its change since the stretch scales the stretch's estimate to the present. */
static uint64_t pace_basis(const nvs_pace_costs *costs, const nvs_pace_set *kinds)
{
    nvs_pace_set left = *kinds;
    uint64_t sum = 0;
    for (unsigned kind; (kind = take(&left)) < NVS_PACE_KINDS;)
        sum += costs->ns[kind];
    return sum;
}

/* How many kinds have no estimate. */
static unsigned unknown(const nvs_pace_costs *costs, const nvs_pace_set *kinds)
{
    nvs_pace_set left = *kinds;
    unsigned count = 0;
    for (unsigned kind; (kind = take(&left)) < NVS_PACE_KINDS;)
        count += costs->ns[kind] == 0;
    return count;
}

/* The stretch took `took_ns`; not `exact`: at most that. */
static void pace_learn(nvs_pace_costs *costs, const nvs_pace_stretch *stretch, uint64_t took_ns, bool exact)
{
    const unsigned fresh = unknown(costs, &stretch->kinds);
    const uint64_t basis_ns = pace_basis(costs, &stretch->kinds);
    const double change = stretch->basis_ns == 0 ? 1.0 : (double)basis_ns / (double)stretch->basis_ns;
    const double known_ns = (double)(stretch->ns - stretch->guess_ns) * change;
    const double estimated_ns = known_ns + (double)stretch->guess_ns;
    double ratio = estimated_ns == 0 ? 1.0 : (double)took_ns / estimated_ns;
    ratio = ratio > MOST_AT_ONCE ? MOST_AT_ONCE : ratio < 1.0 / MOST_AT_ONCE ? 1.0 / MOST_AT_ONCE : ratio;
    if (!exact && ratio >= 1.0 && fresh == 0)
        return; /* an upper bound above the estimate tells nothing */
    nvs_pace_set left = stretch->kinds;
    for (unsigned kind; (kind = take(&left)) < NVS_PACE_KINDS;) {
        uint32_t *ns = &costs->ns[kind];
        if (*ns == 0) /* a new kind comes last in a stretch, and once */
            *ns = clamp(((double)took_ns - known_ns) / fresh);
        else if (fresh == 0)
            *ns = clamp(*ns * (exact ? (3.0 + ratio) / 4.0 : ratio));
    }
}

enum {
    UNMEASURED = 2,      /* events pending before there is an estimate */
    LONGEST_EVERY = 64,  /* an event costs about a fifth of a launch; bounds how late longer kernels are noticed */
    LONE_EVERY = 1024,   /* the same while alone, and not before LONE_GAP_NS */
    GUESSED_EVERY = 16,  /* before a stream has an estimate of its own */
    MOST_TIMEOUTS = 10,  /* consecutive waits that timed out; the patience is then 0.1 ms */
    MOST_RELIEF = 10,    /* every second one doubles the budget while alone; at this one pacing ends */
    FORGIVEN = 250,      /* harmless waits that take one relief back: more than half a second */
};
#define PATIENCE_NS 100000000u      /* beyond twice the estimate, halved for each wait that timed out */
#define FIRST_PATIENCE_NS 1000000u  /* while alone, to measure the work */
#define SHORTEST_NAP_NS 20000u
#define LONGEST_NAP_NS 2000000u

NVS_FORK_STATE static _Atomic uint64_t totals[NVS_MAX_GPUS];       /* submissions covered by events */
NVS_FORK_STATE static _Atomic uint64_t totals_ns[NVS_MAX_GPUS];    /* their estimated time */
NVS_FORK_STATE static _Atomic uint64_t ends_ns[NVS_MAX_GPUS];      /* the estimated end of all work */

/* Something failed: the stream, its context or the device is gone or broken.  The application gets that error from its own calls. */
static void forget(nvs_pace_stream *entry)
{
    *entry = (nvs_pace_stream){.stream = entry->stream, .context = entry->context, .gpu = entry->gpu, .used = entry->used,
                           .due.every = NVS_PACE_RETRY};
}

void nvs_pace_stream_choose_every(nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    const uint64_t longest = entry->estimate.guessed ? GUESSED_EVERY : now->lone ? LONE_EVERY : LONGEST_EVERY;
    /* A check of an idle queue costs more than it can gain. */
    const uint64_t part = !now->lone ? 8 : entry->idle.checks == NVS_PACE_IDLE ? 1 : 6;
    uint64_t every = entry->estimate.each_ns == 0 ? 1 : now->budget_ns / part / entry->estimate.each_ns;
    if (!now->lone) { /* then bounded by every_ns */
        if (entry->due.lone)
            entry->due.stretch.ns = entry->due.stretch.guess_ns = entry->due.since * entry->estimate.each_ns;
        entry->due.every_ns = now->budget_ns / 8;
        every = entry->estimate.each_ns == 0 ? 1 : longest;
    }
    entry->due.lone = now->lone;
    entry->due.every = every < 1 ? 1 : every > longest ? (uint32_t)longest : (uint32_t)every;
}

void nvs_pace_stream_nothing_since(nvs_pace_stream *entry)
{
    entry->due.since = 0;
    entry->due.stretch = (nvs_pace_stretch){0};
}

static void adapt(nvs_pace_stream *entry, uint64_t sample_ns, bool exact, const nvs_pace_terms *now)
{
    if (entry->estimate.guessed)
        entry->estimate.each_ns = 0;
    entry->estimate.guessed = false;
    if (exact)
        entry->estimate.each_ns = entry->estimate.exact ? (3 * entry->estimate.each_ns + sample_ns) / 4 : sample_ns;
    else if (entry->estimate.each_ns == 0 || sample_ns < entry->estimate.each_ns)
        entry->estimate.each_ns = sample_ns;
    else
        exact = entry->estimate.exact; /* an upper bound above the estimate tells nothing */
    entry->estimate.exact = exact;
    if (entry->estimate.each_ns == 0)
        entry->estimate.each_ns = 1;
    nvs_pace_stream_choose_every(entry, now);
}

static void learn(nvs_pace_stream *entry, const nvs_pace_event *took, double ns, const nvs_pace_terms *now)
{
    const uint64_t work_ns = took->stretch.ns;
    const double own = took->span_ns > work_ns ? (double)work_ns / (double)took->span_ns : 1.0;
    pace_learn(now->costs, &took->stretch, (uint64_t)(ns * own), took->follows);
    adapt(entry, (uint64_t)ns / took->span, took->follows, now);
}

/* Checks find no pending work: the program is bound by launching. */
static bool launch_bound(const nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    return now->lone && entry->idle.checks == NVS_PACE_IDLE && entry->pending.count == 1 && entry->idle.quickest_ns != 0 &&
           entry->estimate.each_ns != 0 && !entry->estimate.guessed;
}

/* The time between two launches is an upper bound for the time of one, without a call of the driver (3 us).  The estimate follows the program: one that
 * has slowed down may wait for room in the driver's queue, and the next check must come before that queue has drained. */
static void follow(nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    entry->estimate.each_ns = entry->idle.quickest_ns;
    entry->estimate.exact = false;
    entry->idle.quickest_ns = 0;
    nvs_pace_stream_choose_every(entry, now);
}

void nvs_pace_stream_visited(nvs_pace_stream *entry, uint32_t submissions, uint64_t now_ns)
{
    if (entry->idle.visited_ns != 0 && submissions != 0) {
        const uint64_t each_ns = (now_ns - entry->idle.visited_ns) / submissions + 1;
        if (entry->idle.quickest_ns == 0 || each_ns < entry->idle.quickest_ns)
            entry->idle.quickest_ns = each_ns;
    }
    entry->idle.visited_ns = now_ns;
}

/* Removes the oldest event, which has completed, from the ring. */
static void take_oldest(nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    nvs_pace_event *oldest = &entry->pending.ring[entry->pending.first];
    float milliseconds = 0;
    if (launch_bound(entry, now))
        follow(entry, now);
    else if (entry->pending.done != NULL &&
             NVS_REAL(cuEventElapsedTime)(&milliseconds, entry->pending.done, oldest->event) == CUDA_SUCCESS && milliseconds >= 0)
        learn(entry, oldest, (double)milliseconds * 1e6, now);
    CUevent spare = entry->pending.done;
    entry->pending.done = oldest->event;
    oldest->event = spare; /* used again, or made when it is NULL */
    entry->pending.work -= oldest->work;
    entry->pending.work_ns -= oldest->stretch.ns;
    entry->pending.first = (entry->pending.first + 1) % NVS_PACE_RING;
    entry->pending.count--;
    entry->pending.oldest_ns = now->now_ns;
    entry->pending.stuck = false;
}

static bool remove_completed(nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    while (entry->pending.count > 0) {
        CUresult result = NVS_REAL(cuEventQuery)(entry->pending.ring[entry->pending.first].event);
        if (result == CUDA_ERROR_NOT_READY)
            break;
        if (result != CUDA_SUCCESS)
            return false;
        take_oldest(entry, now);
    }
    return true;
}

/* The estimated pending time.  While alone, an upper bound is no reason to wait: the GPU may be waiting for the program. */
static double pending_ns(const nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    const double known = now->lone && !entry->estimate.exact ? 0 : (double)entry->pending.work_ns;
    if (entry->pending.count == 0 || now->now_ns <= entry->pending.oldest_ns)
        return known;
    const nvs_pace_event *oldest = &entry->pending.ring[entry->pending.first];
    const double passed = (double)(now->now_ns - entry->pending.oldest_ns);
    const double so_far = oldest->span_ns != 0 ? passed * (double)entry->pending.work_ns / (double)oldest->span_ns
                                               : passed * entry->pending.work / (double)oldest->span;
    return so_far > known ? so_far : known;
}

/* How many of the oldest events must complete before the next submission: none below the budget, else enough to free a good part of it, because
 * each wait costs a wake-up.  One event stays pending, to keep the GPU busy.  The limits leave room for submissions until the next
 * event (choose_every), and for errors of the estimates. */
static uint32_t surplus(const nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    const double eighth = (double)now->budget_ns / 8;
    const double most = eighth * (now->lone ? 4 : 6), enough = eighth * (now->lone ? 3 : 4);
    double pending = pending_ns(entry, now);
    uint32_t drop = 0;
    if (entry->estimate.each_ns == 0 && entry->pending.count > UNMEASURED)
        return entry->pending.count - UNMEASURED;
    if (pending <= most)
        return 0;
    const double scale = entry->pending.work_ns != 0 ? pending / (double)entry->pending.work_ns : 0;
    while (drop + 1 < entry->pending.count && pending > enough) {
        const nvs_pace_event *next = &entry->pending.ring[(entry->pending.first + drop++) % NVS_PACE_RING];
        pending -= scale != 0 ? scale * (double)next->stretch.ns : pending * next->work / entry->pending.work;
    }
    return drop;
}

/* --- waiting --- */

/* cuEventSynchronize has no deadline.  The rest of the budget covers a nap that is too long. */
static void nap(uint64_t expected_ns)
{
    uint64_t length = expected_ns / 4 * 3;
    length = length < SHORTEST_NAP_NS ? SHORTEST_NAP_NS : length > LONGEST_NAP_NS ? LONGEST_NAP_NS : length;
    nvs_nap((long)length);
}

/* Sleeps until the `count` oldest events have completed, or have taken far longer than estimated. */
static bool wait_for(nvs_pace_stream *entry, uint32_t count, nvs_pace_terms *now)
{
    const uint64_t began = now->now_ns;
    const CUevent last = entry->pending.ring[(entry->pending.first + count - 1) % NVS_PACE_RING].event;
    uint64_t work = 0, work_ns = 0;
    CUresult result;
    for (uint32_t i = 0; i < count; i++) {
        work += entry->pending.ring[(entry->pending.first + i) % NVS_PACE_RING].work;
        work_ns += entry->pending.ring[(entry->pending.first + i) % NVS_PACE_RING].stretch.ns;
    }
    const double share = entry->pending.work_ns != 0 ? (double)work_ns / (double)entry->pending.work_ns : (double)work / entry->pending.work;
    const uint64_t expected = (uint64_t)(share * pending_ns(entry, now));
    /* While alone, the first waits only measure the work. */
    const bool first = now->lone && entry->estimate.each_ns == 0;
    const uint64_t guess = 2 * expected + FIRST_PATIENCE_NS, most = PATIENCE_NS >> entry->pending.timeouts;
    const uint64_t patience = !first ? 2 * expected + most : guess < most ? guess : most;
    while ((result = NVS_REAL(cuEventQuery)(last)) == CUDA_ERROR_NOT_READY) {
        const uint64_t passed = now->now_ns - began;
        const bool host = nvs_host_functions_run(entry->gpu);
        if (passed > patience || host) {
            entry->pending.stuck = host || !first || now->now_ns - entry->pending.oldest_ns > PATIENCE_NS;
            entry->pending.timeouts += !host && entry->pending.stuck && entry->pending.timeouts < MOST_TIMEOUTS;
            return remove_completed(entry, now);
        }
        nap(passed < expected ? expected - passed : passed / 4);
        now->now_ns = nvs_now_ns();
    }
    entry->pending.timeouts = 0;
    return result == CUDA_SUCCESS && remove_completed(entry, now);
}

/* --- one check --- */

static bool record(nvs_pace_stream *entry, const nvs_pace_terms *now)
{
    nvs_pace_event *next = &entry->pending.ring[(entry->pending.first + entry->pending.count) % NVS_PACE_RING];
    if (next->event == NULL && NVS_REAL(cuEventCreate)(&next->event, CU_EVENT_DEFAULT) != CUDA_SUCCESS) {
        next->event = NULL;
        return false;
    }
    if (NVS_REAL(cuEventRecord)(next->event, entry->stream) != CUDA_SUCCESS)
        return false;
    if (now->lone)
        entry->due.stretch = (nvs_pace_stretch){.ns = entry->due.since * entry->estimate.each_ns};
    entry->due.stretch.basis_ns = pace_basis(now->costs, &entry->due.stretch.kinds);
    const uint64_t since = entry->due.since, since_ns = entry->due.stretch.ns;
    const uint64_t total = since + atomic_fetch_add_explicit(&totals[entry->gpu], since, memory_order_relaxed);
    const uint64_t total_ns = since_ns + atomic_fetch_add_explicit(&totals_ns[entry->gpu], since_ns, memory_order_relaxed);
    next->work = entry->due.since;
    next->stretch = entry->due.stretch;
    next->span = entry->newest.total == 0 ? since : total - entry->newest.total;
    next->span += next->span == 0;
    next->span_ns = entry->newest.total == 0 ? since_ns : total_ns - entry->newest.total_ns;
    entry->newest.total = total;
    entry->newest.total_ns = total_ns;
    next->follows = entry->pending.count > 0;
    if (entry->pending.count == 0)
        entry->pending.oldest_ns = now->now_ns;
    entry->pending.work += next->work;
    entry->pending.work_ns += next->stretch.ns;
    nvs_pace_stream_nothing_since(entry);
    entry->pending.count++;
    const uint64_t end_ns = now->now_ns + entry->pending.work_ns * now->parts;
    if (end_ns > atomic_load_explicit(&ends_ns[entry->gpu], memory_order_relaxed)) /* the loser of a race has a similar value */
        atomic_store_explicit(&ends_ns[entry->gpu], end_ns, memory_order_relaxed);
    return true;
}

/* Detects harm to a program that is alone: the GPU fell idle after pacing had made the thread wait, and the thread did not wait by itself. */
static void detect_harm(nvs_pace_stream *entry, uint32_t synchronized, const nvs_pace_terms *now)
{
    const bool idle = entry->pending.count == 0 && now->now_ns > atomic_load_explicit(&ends_ns[entry->gpu], memory_order_relaxed);
    const bool by_itself = entry->harm.synchronized != synchronized;
    entry->harm.synchronized = synchronized;
    if (by_itself) {
        entry->harm.throttled = false;
    } else if (!now->lone) {
        entry->harm.throttled = false;
        entry->harm.relief = entry->harm.waits = 0; /* its work while alone may be another mixture then */
    } else if (entry->harm.throttled && idle) {
        entry->harm.throttled = false;
        entry->harm.waits = 0;
        entry->harm.relief += entry->harm.relief < MOST_RELIEF;
    }
}

static bool throttle(nvs_pace_stream *entry, uint32_t drop, nvs_pace_terms *now)
{
    if (now->lone && entry->estimate.each_ns != 0) { /* else the wait only measures the work */
        entry->harm.throttled = true;
        if (++entry->harm.waits >= FORGIVEN) {
            entry->harm.waits = 0;
            entry->harm.relief -= entry->harm.relief > 0;
        }
    }
    return wait_for(entry, drop, now);
}

static bool pace(nvs_pace_stream *entry, uint32_t synchronized, nvs_pace_terms *now)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult known = NVS_REAL(cuStreamIsCapturing)(entry->stream, &capture);
    if ((known != CUDA_SUCCESS && known != CUDA_ERROR_NOT_SUPPORTED) || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return true; /* captured, or the legacy stream beside a capture */
    if (entry->due.every == NVS_PACE_RETRY)
        entry->due.every = 1;
    if (now->lone)
        now->budget_ns <<= entry->harm.relief / 2;
    if (!remove_completed(entry, now))
        return false;
    if (entry->pending.count != 0)
        entry->idle.checks = 0;
    else
        entry->idle.checks += entry->idle.checks < NVS_PACE_IDLE;
    if (entry->idle.checks == NVS_PACE_IDLE)
        nvs_pace_stream_choose_every(entry, now);
    else
        entry->idle.visited_ns = entry->idle.quickest_ns = 0;
    detect_harm(entry, synchronized, now);
    if (now->lone && entry->harm.relief == MOST_RELIEF) {
        nvs_pace_stream_nothing_since(entry);
        entry->due.every = LONE_EVERY;
        return true; /* no longer paced */
    }
    if (entry->pending.count == NVS_PACE_RING && (entry->pending.stuck || !throttle(entry, 1, now) || entry->pending.count == NVS_PACE_RING))
        return entry->pending.stuck;
    if (!record(entry, now))
        return false;
    uint32_t drop = entry->pending.stuck ? 0 : surplus(entry, now);
    return drop == 0 || throttle(entry, drop, now);
}

/* The events of a stream are made and used in its own context, which need not be the current one. */
static bool pace_in_context(nvs_pace_stream *entry, uint32_t synchronized, nvs_pace_terms *now)
{
    CUcontext current = NULL;
    bool pushed = false, fine;
    if (entry->owner == NULL && entry->context == NULL &&
        NVS_REAL(cuStreamGetCtx)(entry->stream, &entry->owner) != CUDA_SUCCESS)
        entry->owner = NULL;
    if (entry->owner != NULL && (NVS_REAL(cuCtxGetCurrent)(&current) != CUDA_SUCCESS || current != entry->owner))
        pushed = nvs_context_enter(entry->owner);
    fine = pace(entry, synchronized, now);
    if (pushed)
        (void)NVS_REAL(cuCtxPopCurrent_v2)(&current);
    return fine;
}

void nvs_pace_stream_check(nvs_pace_stream *entry, uint32_t synchronized, nvs_pace_terms *now)
{
    if (!pace_in_context(entry, synchronized, now))
        forget(entry);
}

bool nvs_pace_stream_rare(const nvs_pace_stream *entry)
{
    return entry->due.every >= LONE_EVERY;
}

void nvs_pace_stream_drop(nvs_pace_stream *entry)
{
    for (unsigned i = 0; i < NVS_PACE_RING; i++) /* a pending event may be destroyed: the driver frees it when it completes */
        if (entry->pending.ring[i].event != NULL)
            (void)NVS_REAL(cuEventDestroy_v2)(entry->pending.ring[i].event);
    if (entry->pending.done != NULL)
        (void)NVS_REAL(cuEventDestroy_v2)(entry->pending.done);
}

bool nvs_pace_stream_has_events(const nvs_pace_stream *entry)
{
    bool has = entry->pending.done != NULL;
    for (unsigned i = 0; i < NVS_PACE_RING; i++)
        has |= entry->pending.ring[i].event != NULL;
    return has;
}

NVS_FORK_CODE void nvs_pace_stream_after_fork(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        atomic_store_explicit(&totals[gpu], 0, memory_order_relaxed);
        atomic_store_explicit(&totals_ns[gpu], 0, memory_order_relaxed);
        atomic_store_explicit(&ends_ns[gpu], 0, memory_order_relaxed);
    }
}
