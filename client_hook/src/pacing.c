/* See pacing.h.
 *
 * Pacing.  Each thread keeps, for each stream that it submits to, a ring of events, one recorded every `every` submissions.
 * The GPU time of one submission is estimated from two events that completed one after the other with no gap between
 * (the second was recorded while the first was still pending), so that idle time is not taken for work.  When the
 * estimate of what is pending exceeds the budget, the thread sleeps until the oldest event is done; the rest keeps the
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
    STREAMS = 8,        /* streams that a thread has in mind; others take the place of the one not used for longest */
    UNMEASURED = 4,     /* events pending before there is an estimate */
    LONGEST_STRIDE = 256,
    LOOK_NS = 100000,   /* for one look at a context */
};

typedef struct pace_event {
    CUevent event;
    uint32_t work;      /* submissions since the one before */
    bool follows;       /* recorded while the one before was pending: the time between them is work */
} pace_event;

typedef struct pace_stream {
    CUstream stream;    /* never NULL when in use */
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
    uint64_t clock;
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

static pace_stream *my_stream(pace_thread *thread, uint32_t gpu, CUstream stream)
{
    pace_stream *oldest = &thread->streams[0];
    for (unsigned i = 0; i < STREAMS; i++) {
        pace_stream *entry = &thread->streams[i];
        if (entry->stream == stream && entry->gpu == gpu) {
            entry->used = ++thread->clock;
            return entry;
        }
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
    oldest->gpu = gpu;
    oldest->every = 1;
    oldest->used = ++thread->clock;
    return oldest;
}

/* Something failed: the stream, its context or the device is gone, or broken by the application.  Not ours to report. */
static void forget(pace_stream *entry)
{
    CUstream stream = entry->stream;
    uint32_t gpu = entry->gpu;
    uint64_t used = entry->used;
    memset(entry, 0, sizeof *entry);
    entry->stream = stream;
    entry->gpu = gpu;
    entry->used = used;
    entry->every = 1;
    entry->refused = true;
}

static void adapt(pace_stream *entry, uint64_t sample_ns, uint64_t budget_ns)
{
    entry->each_ns = entry->each_ns == 0 ? sample_ns : (3 * entry->each_ns + sample_ns) / 4;
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
    if (oldest->follows && entry->done != NULL &&
        NVS_REAL(cuEventElapsedTime)(&milliseconds, entry->done, oldest->event) == CUDA_SUCCESS && milliseconds >= 0)
        adapt(entry, (uint64_t)((double)milliseconds * 1e6) / (oldest->work ? oldest->work : 1), budget_ns);
    CUevent spare = entry->done;
    entry->done = oldest->event;
    oldest->event = spare; /* used again, or made when it is NULL */
    entry->work -= oldest->work;
    entry->first = (entry->first + 1) % RING;
    entry->count--;
}

static bool wait_for_oldest(pace_stream *entry, uint64_t budget_ns)
{
    if (NVS_REAL(cuEventSynchronize)(entry->ring[entry->first].event) != CUDA_SUCCESS)
        return false;
    take_oldest(entry, budget_ns);
    return true;
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
    if (NVS_REAL(cuStreamIsCapturing)(entry->stream, &capture) != CUDA_SUCCESS || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        return true; /* being captured, or the legacy stream beside one that is */
    while (entry->count > 0) {
        CUresult result = NVS_REAL(cuEventQuery)(entry->ring[entry->first].event);
        if (result == CUDA_ERROR_NOT_READY)
            break;
        if (result != CUDA_SUCCESS)
            return false;
        take_oldest(entry, budget_ns);
    }
    if (entry->count == RING && !wait_for_oldest(entry, budget_ns))
        return false;
    if (!record(entry))
        return false;
    while (entry->count > 1 && (entry->each_ns == 0 ? entry->count > UNMEASURED
                                                    : entry->each_ns * entry->work > budget_ns)) {
        if (!wait_for_oldest(entry, budget_ns))
            return false;
    }
    return true;
}

void nvs_pace_after(uint32_t gpu, CUstream stream, bool per_thread)
{
    uint64_t budget = atomic_load_explicit(&budgets[gpu], memory_order_relaxed); /* stands for itself */
    if (budget == 0)
        return;
    pace_thread *thread = my_thread();
    if (thread == NULL)
        return;
    if (stream == NULL)
        stream = per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
    pace_stream *entry = my_stream(thread, gpu, stream);
    if (NVS_LIKELY(++entry->since < entry->every) || entry->refused || nvs_capturing())
        return;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    if (!pace(entry, budget))
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
    else if (result == CUDA_SUCCESS && NVS_REAL(cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY)
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
    nvs_status status;
    if (!job->look_only && !nvs_capturing() &&
        (status = drain_by_event(context, job->deadline_ns)) != NVS_UNAVAILABLE)
        return status;
    for (;;) {
        look_at_streams(context, &found);
        if (!found.pending)
            break;
        if (job->look_only || !nap(&looks, job->deadline_ns))
            return NVS_TIMED_OUT;
    }
    if (found.capturing || nvs_capturing())
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
