/* The executor: gives the work of streams its duration.
 *
 * One thread per device, started with the first work, runs the heads of the queues whose dependencies are met.
 * start = the latest of submission, end of the stream's previous work, and end of the dependencies; end = start + duration,
 * or later for a kernel that shares the GPU with other programs (kernel_time.c).
 * A second thread runs the host functions, one at a time as driver 580 does; other streams go on meanwhile.
 * A late wake-up of the thread delays an effect, but no start or end.  The effect of work (bytes, callbacks, events) happens at its
 * end, and its trace record follows.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <sys/prctl.h>

static pthread_cond_t calls_changed = PTHREAD_COND_INITIALIZER;
static sim_op *spare_ops;

static void signal_all(void)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].executor.started)
            nvs_sim_wake(&nvs_sim_devices[i]);
}

/* True if the head can start; *ready is then the latest end of its dependencies. */
static bool dependencies_met(const sim_stream *stream, const sim_op *op, uint64_t *ready)
{
    const sim_context *context = stream->context;
    *ready = 0;
    if (op->work.kind == OP_WAIT) {
        if (!op->work.u.fence->done)
            return false;
        *ready = op->work.u.fence->end_ns;
    }
    if (op->work.kind == OP_WAIT_VALUE) {
        if (context->error == CUDA_SUCCESS && !nvs_sim_value_reached(stream, &op->work.u.value))
            return false;
        *ready = nvs_sim_now_ns();
    }
    if (nvs_sim_is_legacy(stream)) {
        for (const sim_stream *other = context->streams.all; other != NULL; other = other->next) {
            if (other == stream || (other->flags & CU_STREAM_NON_BLOCKING) != 0)
                continue;
            if (other->queue.head != NULL && other->queue.head->sequence < op->sequence)
                return false;
            if (other->queue.last_end_ns > *ready)
                *ready = other->queue.last_end_ns;
        }
    } else if ((stream->flags & CU_STREAM_NON_BLOCKING) == 0 && context->streams.legacy != NULL) {
        const sim_stream *legacy = context->streams.legacy;
        if (legacy->queue.head != NULL && legacy->queue.head->sequence < op->sequence)
            return false;
        if (legacy->queue.last_end_ns > *ready)
            *ready = legacy->queue.last_end_ns;
    }
    return true;
}

static void start(sim_stream *stream, sim_op *op, uint64_t ready)
{
    uint64_t from = op->submitted_ns;
    if (stream->queue.last_end_ns > from)
        from = stream->queue.last_end_ns;
    if (ready > from)
        from = ready;
    op->started = true;
    op->start_ns = from;
    op->end_ns = from + op->work.duration_ns;
}

static uint16_t trace_kind(const sim_op *op)
{
    switch (op->work.kind) {
    case OP_KERNEL: return op->graph ? NVS_SIM_GRAPH : NVS_SIM_KERNEL;
    case OP_COPY: return op->graph ? NVS_SIM_GRAPH : NVS_SIM_COPY;
    case OP_FILL: return op->graph ? NVS_SIM_GRAPH : NVS_SIM_MEMSET;
    case OP_PREFETCH: return NVS_SIM_PREFETCH;
    default: return 0;
    }
}

static sim_op *next_call(const sim_device *device)
{
    sim_stream *stream = device->executor.busy;
    while (stream != NULL && (stream->queue.head == NULL || !stream->queue.head->calling))
        stream = stream->queue.next_busy;
    return stream != NULL ? stream->queue.head : NULL;
}

/* The role of the second thread. */
static void *call_hosts(void *argument)
{
    sim_device *device = argument;
    nvs_sim_thread.in_callback = true;
    pthread_mutex_lock(&nvs_sim_lock);
    for (;;) {
        sim_op *op;
        while ((op = next_call(device)) == NULL)
            pthread_cond_wait(&calls_changed, &nvs_sim_lock);
        const sim_host_call host = op->work.u.host;
        pthread_mutex_unlock(&nvs_sim_lock);
        if (host.function != NULL)
            host.function(host.data);
        else
            host.callback(host.stream, CUDA_SUCCESS, host.data);
        pthread_mutex_lock(&nvs_sim_lock);
        op->calling = false;
        op->called = true;
        op->end_ns = nvs_sim_now_ns(); /* a host function takes real time */
        nvs_sim_wake(device);
    }
    return NULL;
}

/* True: the operation ends when its host function has returned. */
static bool calls_host(sim_device *device, const sim_stream *stream, sim_op *op)
{
    if ((op->work.kind != OP_HOST && op->work.kind != OP_CALLBACK) || op->called || stream->context->error != CUDA_SUCCESS)
        return false;
    if (!device->executor.calls_started && !(device->executor.calls_started = nvs_sim_start_thread(call_hosts, device)))
        return false;
    op->calling = true;
    pthread_cond_broadcast(&calls_changed);
    return true;
}

static CUresult run(sim_stream *stream, sim_op *op)
{
    switch (op->work.kind) {
    case OP_EMPTY:
    case OP_WAIT:
    case OP_ALLOCATE:
    case OP_HOST:
    case OP_CALLBACK:
        return CUDA_SUCCESS;
    case OP_RECORD:
        op->work.u.fence->done = true;
        op->work.u.fence->end_ns = op->end_ns;
        return CUDA_SUCCESS;
    default:
        return nvs_sim_effect(stream, &op->work);
    }
}

static void complete(sim_stream *stream, sim_op *op)
{
    sim_device *device = stream->context->device;
    const uint16_t kind = trace_kind(op);
    CUresult result = CUDA_SUCCESS;
    if (stream->context->error == CUDA_SUCCESS || op->work.kind == OP_RECORD) /* events complete even after an error, so that waits end */
        result = run(stream, op);
    if (result != CUDA_SUCCESS)
        stream->context->error = device->error = result;
    if (kind != 0) {
        const nvs_sim_record record = {.kind = kind, .stream = stream->id, .start_ns = op->start_ns, .end_ns = op->end_ns,
                                       .bytes = op->work.bytes, .work_ns = op->work.duration_ns};
        nvs_sim_trace(device->gpu, &record);
    }
    if (op->work.kind == OP_KERNEL)
        device->executor.kernel_end_ns = op->end_ns;
    stream->queue.last_end_ns = op->end_ns;
    stream->queue.head = op->next;
    if (stream->queue.head == NULL)
        stream->queue.tail = NULL;
    stream->queue.launches -= op->counts;
    if (op->work.kind == OP_RECORD)
        signal_all();
    nvs_sim_discard(&op->work);
    op->next = spare_ops;
    spare_ops = op;
}

static void drop_idle(sim_device *device)
{
    sim_stream **link = &device->executor.busy;
    while (*link != NULL) {
        sim_stream *stream = *link;
        if (stream->queue.head != NULL) {
            link = &stream->queue.next_busy;
            continue;
        }
        *link = stream->queue.next_busy;
        stream->queue.busy = false;
        if (stream->closing)
            nvs_sim_stream_recycle(stream);
    }
}

#define POLL_NS 100000u /* nobody tells that a value in memory has changed */

/* Returns when the heads are to be looked at again. */
static uint64_t start_heads(sim_device *device)
{
    uint64_t ready, again_ns = UINT64_MAX;
    for (sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy) {
        sim_op *op = stream->queue.head;
        if (op != NULL && !op->started && dependencies_met(stream, op, &ready))
            start(stream, op, ready);
        else if (op != NULL && !op->started && op->work.kind == OP_WAIT_VALUE)
            again_ns = nvs_sim_now_ns() + POLL_NS;
    }
    return again_ns;
}

/* The stream with the earliest end of a started head; NULL: nothing runs. */
static sim_stream *next_to_end(const sim_device *device)
{
    sim_stream *first = NULL;
    for (sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy) {
        const sim_op *op = stream->queue.head;
        if (op != NULL && op->started && !op->calling && (first == NULL || op->end_ns < first->queue.head->end_ns))
            first = stream;
    }
    return first;
}

static void *execute(void *argument)
{
    sim_device *device = argument;
    prctl(PR_SET_NAME, "simulated_gpu");
    prctl(PR_SET_TIMERSLACK, 1UL);
    pthread_mutex_lock(&nvs_sim_lock);
    for (;;) {
        uint64_t check_ns;
        const uint32_t wakes = nvs_sim_wakes(device);
        const uint64_t again_ns = start_heads(device);
        const uint64_t now_ns = nvs_sim_time_kernels(device, &check_ns);
        sim_stream *stream = next_to_end(device);
        if (stream != NULL && stream->queue.head->end_ns <= now_ns) {
            if (!calls_host(device, stream, stream->queue.head))
                complete(stream, stream->queue.head);
            continue;
        }
        if (stream != NULL && stream->queue.head->end_ns < check_ns)
            check_ns = stream->queue.head->end_ns;
        if (again_ns < check_ns)
            check_ns = again_ns;
        drop_idle(device);
        pthread_cond_broadcast(&nvs_sim_done); /* last: the end of a context waits for recycled streams, too */
        nvs_sim_sleep(device, wakes, check_ns);
    }
    return NULL;
}

static sim_op *new_op(void)
{
    sim_op *op = spare_ops;
    if (op == NULL)
        return malloc(sizeof *op);
    spare_ops = op->next;
    return op;
}

static CUresult queue(sim_stream *stream, const sim_work *work, bool counts, bool graph)
{
    sim_device *device = stream->context->device;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    while (counts && stream->queue.launches >= nvs_sim_settings.launch_queue) /* as in the driver, a full queue blocks the launch */
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
    if (!device->executor.started && !(device->executor.started = nvs_sim_start_thread(execute, device)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_op *op = new_op();
    if (op == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *op = (sim_op){.work = *work, .sequence = ++nvs_sim_sequence, .submitted_ns = nvs_sim_now_ns(), .counts = counts, .graph = graph};
    const bool was_empty = stream->queue.head == NULL;
    if (was_empty)
        stream->queue.head = op;
    else
        stream->queue.tail->next = op;
    stream->queue.tail = op;
    stream->queue.launches += counts;
    if (!stream->queue.busy) {
        stream->queue.busy = true;
        stream->queue.next_busy = device->executor.busy;
        device->executor.busy = stream;
    }
    if (was_empty)
        nvs_sim_wake(device);
    return CUDA_SUCCESS;
}

CUresult nvs_sim_enqueue(sim_stream *stream, const sim_work *work, bool counts, bool graph)
{
    const CUresult result = queue(stream, work, counts, graph);
    if (result != CUDA_SUCCESS)
        nvs_sim_discard(work);
    return result;
}

CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work)
{
    const bool captures = stream->capture.of != NULL;
    const CUresult result = captures ? nvs_sim_capture_work(stream, work) : nvs_sim_capture_implicit(stream);
    if (result != CUDA_SUCCESS)
        nvs_sim_discard(work);
    return result != CUDA_SUCCESS || captures ? result : nvs_sim_enqueue(stream, work, work->kind == OP_KERNEL, false);
}
