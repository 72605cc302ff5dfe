/* See pacing.h.
 *
 * Pacing.  Each thread keeps, for each stream that it submits to, a ring of events, one recorded every `every` submissions.
 * The GPU time of one submission is estimated from two events that completed one after the other with no gap between
 * (the second was recorded while the first was still pending), so that idle time is not taken for work.  With a gap, as in
 * programs that are bound by launching, the time between them is still an upper bound, and lowers an estimate above it.  When the
 * estimate of what is pending exceeds the budget, the thread sleeps until a part of it is done; the rest keeps the
 * GPU busy meanwhile.  `every` follows the estimate so that a ring spans the budget.
 *
 * Captures.  Nothing is recorded, queried or waited for while any stream of the process is being captured, and all of it is done
 * in relaxed capture mode, so that a capture which begins at that very moment elsewhere is not invalidated by us.
 *
 * Events belong to a context; when one is destroyed its events die with it.  nvs_pacing_context_gone() then makes every
 * thread forget what it has, without touching the handles.
 *
 * Draining.  With the gate closed nothing new is submitted, so one look at each stream, or at the whole context, that finds
 * nothing pending is final.  cuCtxRecordEvent (CUDA 12.5) sees all of a context, per-thread default streams of other
 * threads and internal streams included, and can be polled against a deadline.  Without it the known streams are
 * polled until the deadline and then cuCtxSynchronize, which by then has little left to wait for, covers the others.
 */
#include "pacing.h"

#include "context.h"
#include "cuda_api.h"
#include "gate.h"
#include "log.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    RING = 16,          /* events a stream and thread; one more is kept as the reference for times */
    STREAMS = 16,       /* streams that a thread has in mind; others take the place of the one not used for longest */
    UNMEASURED = 4,     /* events pending before there is an estimate */
    LONGEST_STRIDE = 64, /* an event costs about a fifth of a launch; long kernels after short ones are noticed so late */
    RECENT = 256,       /* submissions of a thread: a stream not used for so long does not count as busy */
    LOOK_NS = 100000,   /* for one look at a context */
};

typedef struct pace_event {
    CUevent event;
    uint32_t work;      /* submissions since the one before */
    bool follows;       /* recorded while the one before was pending: the time between them is work */
} pace_event;

typedef struct pace_stream {
    CUstream stream;    /* never NULL when in use */
    CUcontext context;  /* of a default stream, of which each context has its own; else NULL */
    uint32_t gpu;
    bool refused;       /* events of the current context cannot be recorded there */
    uint32_t since;     /* submissions since the last event */
    uint32_t every;
    uint32_t first, count; /* pending events in the ring */
    uint32_t work;      /* submissions that the pending events stand for */
    uint64_t each_ns;   /* estimate; 0: none yet */
    uint64_t used;      /* for replacement */
    CUevent done;       /* the last one that completed, reference of times */
    pace_event ring[RING];
} pace_stream;

typedef struct pace_thread {
    uint32_t generation;
    uint64_t clock;     /* submissions */
    pace_stream *last;
    pace_stream streams[STREAMS];
} pace_thread;

static _Atomic uint64_t budgets[NVS_MAX_GPUS];
static _Atomic uint32_t generation; /* grows when events may have died */
static _Thread_local pace_thread *mine __attribute__((tls_model("initial-exec")));
static pthread_key_t key;
static pthread_once_t key_once = PTHREAD_ONCE_INIT;
static bool key_made;

static void thread_ends(void *argument)
{
    /* Its events stay until their context is destroyed: the driver may not be called while a thread is torn down. */
    mine = NULL;
    free(argument);
}

static void make_key(void)
{
    key_made = pthread_key_create(&key, thread_ends) == 0;
}

static pace_thread *my_thread(void)
{
    pace_thread *thread = mine;
    uint32_t now = atomic_load_explicit(&generation, memory_order_acquire); /* pairs with nvs_pacing_context_gone */
    if (thread == NULL) {
        (void)pthread_once(&key_once, make_key);
        if (!key_made || (thread = calloc(1, sizeof *thread)) == NULL)
            return NULL;
        if (pthread_setspecific(key, thread) != 0) {
            free(thread);
            return NULL;
        }
        mine = thread;
        thread->generation = now;
    }
    if (thread->generation != now) {
        memset(thread, 0, sizeof *thread);
        thread->generation = now;
    }
    return thread;
}

static pace_stream *my_stream(pace_thread *thread, uint32_t gpu, CUstream stream, CUcontext context)
{
    pace_stream *oldest = &thread->streams[0], *entry = thread->last;
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
    for (unsigned i = 0; i < RING; i++) /* destroying a pending event is legal: it goes when it is done */
        if (oldest->ring[i].event != NULL)
            (void)NVS_REAL(cuEventDestroy_v2)(oldest->ring[i].event);
    if (oldest->done != NULL)
        (void)NVS_REAL(cuEventDestroy_v2)(oldest->done);
    memset(oldest, 0, sizeof *oldest);
    oldest->stream = stream;
    oldest->context = context;
    oldest->gpu = gpu;
    oldest->every = 1;
    return thread->last = oldest;
}

/* Something failed: the stream, its context or the device is gone, or broken by the application.  Not ours to report. */
static void forget(pace_stream *entry)
{
    *entry = (pace_stream){.stream = entry->stream, .context = entry->context, .gpu = entry->gpu, .used = entry->used,
                           .every = 1, .refused = true};
}

static void adapt(pace_stream *entry, uint64_t sample_ns, bool exact, uint64_t budget_ns)
{
    if (entry->each_ns == 0 || (!exact && sample_ns < entry->each_ns))
        entry->each_ns = sample_ns;
    else if (exact)
        entry->each_ns = (3 * entry->each_ns + sample_ns) / 4;
    if (entry->each_ns == 0)
        entry->each_ns = 1;
    uint64_t every = budget_ns / (RING / 2) / entry->each_ns;
    entry->every = every < 1 ? 1 : every > LONGEST_STRIDE ? LONGEST_STRIDE : (uint32_t)every;
}

/* Takes the oldest event, which is done, out of the ring. */
static void take_oldest(pace_stream *entry, uint64_t budget_ns)
{
    pace_event *oldest = &entry->ring[entry->first];
    float milliseconds = 0;
    if (entry->done != NULL &&
        NVS_REAL(cuEventElapsedTime)(&milliseconds, entry->done, oldest->event) == CUDA_SUCCESS && milliseconds >= 0)
        adapt(entry, (uint64_t)((double)milliseconds * 1e6) / (oldest->work ? oldest->work : 1), oldest->follows, budget_ns);
    CUevent spare = entry->done;
    entry->done = oldest->event;
    oldest->event = spare; /* used again, or made when it is NULL */
    entry->work -= oldest->work;
    entry->first = (entry->first + 1) % RING;
    entry->count--;
}

/* Sleeps until the `count` oldest events are done, with one wake-up. */
static bool wait_for(pace_stream *entry, uint32_t count, uint64_t budget_ns)
{
    if (NVS_REAL(cuEventSynchronize)(entry->ring[(entry->first + count - 1) % RING].event) != CUDA_SUCCESS)
        return false;
    while (count-- > 0)
        take_oldest(entry, budget_ns);
    return true;
}

/* How many of the oldest events must be done before more may be submitted: none below the budget, else so many that a
 * good part of it is free again, because each wait costs a wake-up.  One always stays, to keep the GPU busy. */
static uint32_t surplus(const pace_stream *entry, uint64_t budget_ns)
{
    /* What follows until the next event is recorded comes on top. */
    uint64_t most = budget_ns - budget_ns / 8, enough = budget_ns / 8 * 5;
    uint64_t pending = entry->work;
    uint32_t drop = 0;
    if (entry->each_ns == 0)
        return entry->count > UNMEASURED ? entry->count - UNMEASURED : 0;
    if (entry->each_ns * pending <= most)
        return 0;
    while (drop + 1 < entry->count && entry->each_ns * pending > enough)
        pending -= entry->ring[(entry->first + drop++) % RING].work;
    return drop;
}

static bool record(pace_stream *entry)
{
    pace_event *next = &entry->ring[(entry->first + entry->count) % RING];
    if (next->event == NULL &&
        NVS_REAL(cuEventCreate)(&next->event, CU_EVENT_BLOCKING_SYNC) != CUDA_SUCCESS) {
        next->event = NULL;
        return false;
    }
    if (NVS_REAL(cuEventRecord)(next->event, entry->stream) != CUDA_SUCCESS)
        return false;
    next->work = entry->since;
    next->follows = entry->count > 0;
    entry->work += next->work;
    entry->since = 0;
    entry->count++;
    return true;
}

static bool pace(pace_stream *entry, uint64_t budget_ns)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult known = NVS_REAL(cuStreamIsCapturing)(entry->stream, &capture);
    if ((known != CUDA_SUCCESS && known != CUDA_ERROR_NOT_SUPPORTED) || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return true; /* being captured, or the legacy stream beside one that is */
    while (entry->count > 0) {
        CUresult result = NVS_REAL(cuEventQuery)(entry->ring[entry->first].event);
        if (result == CUDA_ERROR_NOT_READY)
            break;
        if (result != CUDA_SUCCESS)
            return false;
        take_oldest(entry, budget_ns);
    }
    if (entry->count == RING && !wait_for(entry, 1, budget_ns))
        return false;
    if (!record(entry))
        return false;
    uint32_t drop = surplus(entry, budget_ns);
    return drop == 0 || wait_for(entry, drop, budget_ns);
}

/* The streams of a thread share its budget, for what they have pending may have to run one after the other. */
static uint64_t share(const pace_thread *thread, const pace_stream *mine_now, uint64_t budget_ns)
{
    unsigned busy = 1;
    for (unsigned i = 0; i < STREAMS; i++) {
        const pace_stream *entry = &thread->streams[i];
        busy += entry != mine_now && entry->gpu == mine_now->gpu && entry->count > 0 &&
                thread->clock - entry->used < RECENT;
    }
    return budget_ns / busy;
}

void nvs_pace_after(uint32_t gpu, CUstream stream, bool per_thread)
{
    uint64_t budget = atomic_load_explicit(&budgets[gpu], memory_order_relaxed); /* stands for itself */
    if (budget == 0)
        return;
    pace_thread *thread = my_thread();
    if (thread == NULL)
        return;
    CUcontext context = NULL;
    if (stream == NULL)
        stream = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    if ((stream == CU_STREAM_PER_THREAD || stream == CU_STREAM_LEGACY) &&
        NVS_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return;
    pace_stream *entry = my_stream(thread, gpu, stream, context);
    if (NVS_LIKELY(++entry->since < entry->every) || entry->refused || nvs_capturing())
        return;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    if (!pace(entry, share(thread, entry, budget)))
        forget(entry);
    if (exchanged)
        (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

void nvs_pacing_set_budget(uint32_t gpu, uint64_t budget_ns)
{
    atomic_store_explicit(&budgets[gpu], budget_ns, memory_order_relaxed); /* stands for itself */
}

void nvs_pacing_context_gone(void)
{
    atomic_fetch_add_explicit(&generation, 1, memory_order_release); /* pairs with my_thread */
}

/* --- draining --- */

typedef struct look {
    bool pending;   /* something is not done */
    bool capturing; /* a stream is being captured: nothing context-wide may be asked */
} look;

static void look_at(CUstream stream, look *found)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = NVS_REAL(cuStreamIsCapturing)(stream, &capture);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        found->capturing = true;
    else if ((result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_SUPPORTED) && /* a driver from before captures */
             NVS_REAL(cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY)
        found->pending = true; /* any other error: nothing runs there that could be waited for */
}

static bool look_at_stream(CUstream stream, void *argument)
{
    look *found = argument;
    look_at(stream, found);
    return !found->pending;
}

static void look_at_streams(CUcontext context, look *found)
{
    *found = (look){.capturing = nvs_capturing()};
    if (!found->capturing)
        look_at(CU_STREAM_LEGACY, found);
    if (!found->pending)
        nvs_each_stream(context, look_at_stream, found);
}

typedef struct drain {
    uint64_t deadline_ns;
    bool look_only; /* do not wait for what a stream has pending */
    nvs_status status;
} drain;

/* The first looks follow each other at once, then with naps that grow to a bound: late by at most that much. */
static bool nap(unsigned *looks, uint64_t deadline_ns)
{
    uint64_t now = nvs_now_ns();
    if (now >= deadline_ns)
        return false;
    unsigned count = ++*looks;
    if (count <= 16)
        return true;
    uint64_t length = count <= 64 ? 10000 : 30000;
    if (length > deadline_ns - now)
        length = deadline_ns - now;
    struct timespec wait = {0, (long)length};
    (void)nanosleep(&wait, NULL);
    return true;
}

/* The whole context by one event.  UNAVAILABLE when the driver cannot do it (now). */
static nvs_status drain_by_event(CUcontext context, uint64_t deadline_ns)
{
    CUevent event;
    nvs_status status = NVS_UNAVAILABLE;
    unsigned looks = 0;
    CUresult result;
#if CUDA_VERSION >= 12050
    if (!NVS_HAS(cuCtxRecordEvent) || NVS_REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return NVS_UNAVAILABLE;
    if (NVS_REAL(cuCtxRecordEvent)(context, event) != CUDA_SUCCESS)
        goto out;
    while ((result = NVS_REAL(cuEventQuery)(event)) == CUDA_ERROR_NOT_READY && nap(&looks, deadline_ns)) {
    }
    status = result == CUDA_ERROR_NOT_READY ? NVS_TIMED_OUT : NVS_OK;
out:
    (void)NVS_REAL(cuEventDestroy_v2)(event);
#endif
    return status;
}

static nvs_status drain_context(CUcontext context, const drain *job)
{
    look found;
    unsigned looks = 0;
    nvs_status status = NVS_UNAVAILABLE;
    if (!job->look_only && !nvs_capturing())
        status = drain_by_event(context, job->deadline_ns);
    if (status == NVS_TIMED_OUT)
        return status;
    for (;;) {
        look_at_streams(context, &found);
        if (!found.pending)
            break;
        if (job->look_only || !nap(&looks, job->deadline_ns))
            return NVS_TIMED_OUT;
    }
    if (status == NVS_OK || found.capturing || nvs_capturing())
        return NVS_OK;
    if (job->look_only)
        return drain_by_event(context, job->deadline_ns) == NVS_TIMED_OUT ? NVS_TIMED_OUT : NVS_OK;
    (void)NVS_REAL(cuCtxSynchronize)(); /* an error is the application's; what failed does not run */
    return NVS_OK;
}

static bool visit_context(CUcontext context, void *argument)
{
    drain *job = argument;
    CUcontext popped;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (NVS_REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true; /* it has died: so has its work */
    bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    job->status = drain_context(context, job);
    if (exchanged)
        (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    (void)NVS_REAL(cuCtxPopCurrent_v2)(&popped);
    return job->status == NVS_OK;
}

nvs_status nvs_drain(uint32_t gpu, uint64_t deadline_ns)
{
    drain job = {deadline_ns, false, NVS_OK};
    nvs_each_context(gpu, visit_context, &job);
    return job.status;
}

bool nvs_gpu_idle(uint32_t gpu)
{
    /* An event on an idle context takes the GPU some microseconds. */
    drain job = {nvs_now_ns() + LOOK_NS, true, NVS_OK};
    nvs_each_context(gpu, visit_context, &job);
    return job.status == NVS_OK;
}

void nvs_pacing_after_fork(void)
{
    mine = NULL; /* the parent's events; its memory is not worth a call to free() here */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        atomic_store_explicit(&budgets[gpu], 0, memory_order_relaxed);
}
