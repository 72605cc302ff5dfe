/* Draining: the second half of pacing.h.
 *
 * With the gate closed nothing new is submitted, so a query of each stream, or of the whole context, that finds nothing pending is final.
 * cuCtxRecordEvent (CUDA 12.5) covers a whole context, per-thread default streams and internal streams included, and can be polled until a
 * deadline.  On an older driver an event in the legacy stream, which is behind all blocking streams, and the known streams are polled until the
 * deadline; then cuCtxSynchronize, which has no deadline, returns at once.
 *
 * While a stream is captured, neither the whole context nor a default stream may be queried.  Marks stand for their work (captures.h), and for
 * a graph's work on another GPU than its stream's, which no context of that GPU shows (marks.h).  A drain queries the streams first: a stream
 * that has joined a capture meanwhile has a mark already.
 *
 * With the gate closed, a stream that a host function holds up is drained (host_functions.h).  The event of the whole context is behind that function, so
 * the streams are queried, and the marks stand for per-thread default streams.
 *
 * A context that the program is about to end is skipped while its work runs.  The thread that ends it stays in the gate until the context has
 * ended or is listed again.  The drain waits for that thread, and starts again.
 */
#include "base/process.h"
#include "contexts/context.h"
#include "inflight/pacing.h"

#include "base/system.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "gate/host_functions.h"
#include "inflight/captures.h"
#include "inflight/marks.h"

enum { LOOK_NS = 100000 }; /* for the queries of one context */

typedef struct look {
    bool pending;   /* something is not done */
    bool capturing; /* a stream is captured: nothing context-wide may be queried */
    bool holds;     /* a host function holds up a stream that is not done */
    bool closed;    /* the gate is: such streams are drained */
    uint32_t graphs; /* streams that host functions of graphs hold up, less those that are not done */
    CUcontext context;
} look;

static bool held_up(CUstream stream, look *found)
{
    unsigned flags = CU_STREAM_NON_BLOCKING;
    if (!found->closed)
        return false;
    (void)NVS_REAL(cuStreamGetFlags)(stream, &flags);
    return nvs_host_function_holds(found->context, stream, (flags & CU_STREAM_NON_BLOCKING) == 0) || (found->graphs != 0 && found->graphs-- != 0);
}

static void look_at(CUstream stream, look *found)
{
    CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
    CUresult result = NVS_REAL(cuStreamIsCapturing)(stream, &capture);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT || capture != CU_STREAM_CAPTURE_STATUS_NONE)
        found->capturing = true;
    else if ((result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_SUPPORTED) && /* a driver from before captures */
             NVS_REAL(cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY) { /* any other error: no work runs there */
        const bool held = held_up(stream, found);
        found->holds |= held;
        found->pending = !held;
    }
}

static bool look_at_stream(CUstream stream, void *argument)
{
    look *found = argument;
    look_at(stream, found);
    return !found->pending;
}

static void look_at_streams(CUcontext context, uint32_t gpu, bool closed, look *found)
{
    closed = closed && nvs_host_functions_run(gpu);
    *found = (look){.capturing = nvs_capturing(), .context = context, .closed = closed, .graphs = closed ? nvs_host_functions_of_graphs(gpu) : 0};
    if (!found->capturing)
        look_at(CU_STREAM_LEGACY, found);
    if (!found->pending)
        nvs_each_stream(context, look_at_stream, found);
}

typedef struct drain {
    uint32_t gpu;
    bool marks; /* query only the marks of work on that GPU */
    uint64_t upto; /* later marks are of work that was submitted after the drain began */
    uint64_t deadline_ns;
    bool closed; /* the gate is */
    bool look_only; /* do not wait */
    bool streams_only; /* submit no event */
    nvs_status status;
} drain;

/* No pause between the first queries; then pauses of 10 us and 30 us.  False: the deadline has passed. */
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
    nvs_nap((long)length);
    return true;
}

/* Behind all work of the current context; on an older driver, behind the work of all blocking streams. */
static CUresult record_event(CUcontext context, CUevent event)
{
    look found = {0};
    if (NVS_HAS(cuCtxRecordEvent))
        return NVS_REAL(cuCtxRecordEvent)(context, event);
    look_at(CU_STREAM_LEGACY, &found); /* an event there would invalidate a capture */
    return found.capturing ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : NVS_REAL(cuEventRecord)(event, CU_STREAM_LEGACY);
}

/* The whole context by one event.  UNAVAILABLE when the driver cannot do it (now). */
static nvs_status drain_by_event(CUcontext context, uint64_t deadline_ns)
{
    CUevent event;
    nvs_status status = NVS_UNAVAILABLE;
    unsigned looks = 0;
    CUresult result;
    if (NVS_REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return NVS_UNAVAILABLE;
    if (record_event(context, event) != CUDA_SUCCESS)
        goto out;
    while ((result = NVS_REAL(cuEventQuery)(event)) == CUDA_ERROR_NOT_READY && nap(&looks, deadline_ns)) {
    }
    status = result == CUDA_ERROR_NOT_READY ? NVS_TIMED_OUT : NVS_OK;
out:
    (void)NVS_REAL(cuEventDestroy_v2)(event);
    return status;
}

static nvs_status drain_context(CUcontext context, const drain *job)
{
    look found;
    unsigned looks = 0;
    nvs_status status = NVS_UNAVAILABLE;
    if (job->streams_only) {
        look_at_streams(context, job->gpu, job->closed, &found);
        return found.pending ? NVS_TIMED_OUT : NVS_OK;
    }
    const bool held = job->closed && nvs_host_functions_run(job->gpu);
    if (!job->look_only && !nvs_capturing() && !held)
        status = drain_by_event(context, job->deadline_ns);
    if (status == NVS_TIMED_OUT)
        return status;
    for (;;) {
        look_at_streams(context, job->gpu, job->closed, &found);
        if (!found.pending)
            break;
        if (job->look_only || !nap(&looks, job->deadline_ns))
            return NVS_TIMED_OUT;
    }
    if ((status == NVS_OK && NVS_HAS(cuCtxRecordEvent)) || found.capturing || found.holds || nvs_capturing())
        return NVS_OK;
    if (job->look_only || held)
        return drain_by_event(context, job->deadline_ns) == NVS_TIMED_OUT ? NVS_TIMED_OUT : NVS_OK;
    (void)NVS_REAL(cuCtxSynchronize)(); /* after an error of the application's work nothing runs */
    return NVS_OK;
}

static nvs_status drain_marks(CUcontext context, const drain *job)
{
    unsigned looks = 0;
    while (nvs_mark_pending(job->gpu, context, job->upto))
        if (job->look_only || !nap(&looks, job->deadline_ns))
            return NVS_TIMED_OUT;
    return NVS_OK;
}

static bool visit_context(CUcontext context, void *argument)
{
    drain *job = argument;
    CUcontext popped;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (!nvs_context_enter(context))
        return true; /* the context is dead, and so is its work */
    bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    job->status = job->marks ? drain_marks(context, job) : drain_context(context, job);
    if (exchanged)
        (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    (void)NVS_REAL(cuCtxPopCurrent_v2)(&popped);
    return job->status == NVS_OK;
}

/* False: a context was skipped. */
static bool drain_all(drain *job)
{
    bool all = nvs_each_context(job->gpu, visit_context, job);
    const uint32_t others = job->status == NVS_OK ? nvs_marked_by(job->gpu) : 0;
    job->marks = true;
    job->upto = nvs_marks_made();
    for (uint32_t gpu = 0; others != 0 && gpu < NVS_MAX_GPUS && job->status == NVS_OK; gpu++)
        if ((others >> gpu & 1) != 0 && !nvs_each_context(gpu, visit_context, job))
            all = false;
    return all;
}

nvs_status nvs_drain(uint32_t gpu, uint64_t deadline_ns)
{
    drain job = {.gpu = gpu, .deadline_ns = deadline_ns};
    (void)drain_all(&job);
    return job.status;
}

static nvs_status drain_closed(uint32_t gpu, uint64_t deadline_ns)
{
    for (unsigned looks = 0;;) {
        drain job = {.gpu = gpu, .closed = true, .deadline_ns = deadline_ns};
        const bool all = drain_all(&job);
        const bool ended = job.status == NVS_OK && all && !nvs_gate_inside(gpu);
        if (ended)
            (void)nvs_gpu_check_dead(gpu); /* failed work has ended, too */
        if (ended || job.status != NVS_OK)
            return job.status;
        /* Waits for threads in the gate, but not for a thread that ends a context inside another GPU's gate. */
        if (nvs_gate_close(gpu, deadline_ns) != NVS_OK || !nap(&looks, deadline_ns))
            return NVS_TIMED_OUT;
    }
}

nvs_status nvs_drain_closed(uint32_t gpu, uint64_t deadline_ns)
{
    const uint32_t gpus = nvs_gate_linked_with(gpu);
    nvs_status status = NVS_OK;
    for (uint32_t each = 0; each < NVS_MAX_GPUS && status == NVS_OK; each++)
        if ((gpus >> each & 1) != 0)
            status = drain_closed(each, deadline_ns);
    return status;
}

static bool is_idle(uint32_t gpu)
{
    /* An event on an idle context takes the GPU some microseconds. */
    drain job = {.gpu = gpu, .deadline_ns = nvs_now_ns() + LOOK_NS, .closed = true, .look_only = true};
    return drain_all(&job) && job.status == NVS_OK;
}

bool nvs_gpu_idle(uint32_t gpu)
{
    const uint32_t gpus = nvs_gate_linked_with(gpu);
    bool idle = true;
    for (uint32_t each = 0; each < NVS_MAX_GPUS && idle; each++)
        idle = (gpus >> each & 1) == 0 || is_idle(each);
    return idle;
}

bool nvs_gpu_sample(uint32_t gpu, bool *busy)
{
    drain job = {.gpu = gpu, .streams_only = true};
    if (!nvs_captures_pause())
        return false;
    (void)nvs_each_context(gpu, visit_context, &job);
    nvs_captures_resume();
    *busy = job.status != NVS_OK;
    return true;
}
