/* Streams, and the executor that lets their work take its time.
 *
 * A stream is a FIFO.  One executor thread per device, started with the first work, runs the heads whose dependencies
 * are met.  start = the latest of (submission, end of the stream's previous work, end of what it waited for), end = start +
 * duration: analytic, so a late wake-up delays an effect but adds nothing to the sums.  The effect of work (bytes,
 * callbacks, events) happens at its end, never before, and the trace is written after it.
 * An executor with nothing to do sleeps on its condition.
 */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

uint64_t nvs_sim_sequence;

static sim_stream *spare_streams;
static sim_op *spare_ops;

static void signal_all(void)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].executor_started)
            pthread_cond_signal(&nvs_sim_devices[i].work);
}

/* Can the head start?  Then *ready is the end of whatever it waited for. */
static bool dependencies_met(const sim_stream *stream, const sim_op *op, uint64_t *ready)
{
    const sim_context *context = stream->context;
    *ready = 0;
    if (op->work.kind == OP_WAIT) {
        if (!op->work.u.fence->done)
            return false;
        *ready = op->work.u.fence->end_ns;
    }
    if (stream->legacy) {
        for (const sim_stream *other = context->streams; other != NULL; other = other->next) {
            if (other == stream || (other->flags & CU_STREAM_NON_BLOCKING) != 0)
                continue;
            if (other->head != NULL && other->head->sequence < op->sequence)
                return false;
            if (other->last_end_ns > *ready)
                *ready = other->last_end_ns;
        }
    } else if ((stream->flags & CU_STREAM_NON_BLOCKING) == 0 && context->default_stream != NULL) {
        const sim_stream *legacy = context->default_stream;
        if (legacy->head != NULL && legacy->head->sequence < op->sequence)
            return false;
        if (legacy->last_end_ns > *ready)
            *ready = legacy->last_end_ns;
    }
    return true;
}

static void start(sim_stream *stream, sim_op *op, uint64_t ready)
{
    uint64_t from = op->submitted_ns;
    if (stream->last_end_ns > from)
        from = stream->last_end_ns;
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

static void complete(sim_stream *stream, sim_op *op)
{
    sim_device *device = stream->context->device;
    uint16_t kind = trace_kind(op);
    CUresult result = CUDA_SUCCESS;
    if (stream->context->error == CUDA_SUCCESS)
        result = nvs_sim_execute(stream, &op->work, op->end_ns);
    else if (op->work.kind == OP_RECORD) /* nobody may wait for ever for an event of a broken context */
        nvs_sim_execute(stream, &op->work, op->end_ns);
    if (result != CUDA_SUCCESS)
        stream->context->error = device->error = result;
    if (op->work.kind == OP_HOST || op->work.kind == OP_CALLBACK)
        op->end_ns = nvs_sim_now_ns(); /* took what it took: what is behind it begins now */
    const nvs_sim_observer *watcher = atomic_load_explicit(&nvs_sim_watcher, memory_order_acquire); /* as in nvs_sim_enter */
    if (watcher != NULL && op->symbol != NULL) /* it was there when this was submitted */
        nvs_sim_tell_ran(watcher, op);
    if (kind != 0)
        nvs_sim_trace(device->gpu, stream->id, kind, op->start_ns, op->end_ns, op->work.bytes);
    stream->last_end_ns = op->end_ns;
    stream->head = op->next;
    if (stream->head == NULL)
        stream->tail = NULL;
    stream->completed++;
    stream->launches -= op->counts;
    if (op->work.kind == OP_RECORD)
        signal_all();
    nvs_sim_discard(&op->work);
    op->next = spare_ops;
    spare_ops = op;
}

static void recycle_stream(sim_stream *stream)
{
    sim_stream **link = &stream->context->streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    stream->magic = 0;
    stream->next = spare_streams;
    spare_streams = stream;
}

static void drop_idle(sim_device *device)
{
    sim_stream **link = &device->busy;
    while (*link != NULL) {
        sim_stream *stream = *link;
        if (stream->head != NULL) {
            link = &stream->next_busy;
            continue;
        }
        *link = stream->next_busy;
        stream->busy = false;
        if (stream->closing)
            recycle_stream(stream);
    }
}

/* Starts what can start; the stream whose head ends first, or NULL when nothing runs. */
static sim_stream *next_to_end(sim_device *device)
{
    sim_stream *first = NULL;
    uint64_t ready;
    for (sim_stream *stream = device->busy; stream != NULL; stream = stream->next_busy) {
        sim_op *op = stream->head;
        if (op == NULL)
            continue;
        if (!op->started && dependencies_met(stream, op, &ready))
            start(stream, op, ready);
        if (op->started && (first == NULL || op->end_ns < first->head->end_ns))
            first = stream;
    }
    return first;
}

static void *execute_for_ever(void *argument)
{
    sim_device *device = argument;
    prctl(PR_SET_NAME, "simulated_gpu");
    prctl(PR_SET_TIMERSLACK, 1UL);
    pthread_mutex_lock(&nvs_sim_lock);
    for (;;) {
        sim_stream *stream = next_to_end(device);
        if (stream == NULL) {
            drop_idle(device);
            pthread_cond_broadcast(&nvs_sim_done); /* after it: close_context waits for both */
            pthread_cond_wait(&device->work, &nvs_sim_lock);
            continue;
        }
        uint64_t end_ns = stream->head->end_ns;
        if (end_ns <= nvs_sim_now_ns()) {
            complete(stream, stream->head);
            continue;
        }
        struct timespec until = {.tv_sec = (time_t)(end_ns / 1000000000u), .tv_nsec = (long)(end_ns % 1000000000u)};
        drop_idle(device);
        pthread_cond_broadcast(&nvs_sim_done);
        pthread_cond_timedwait(&device->work, &nvs_sim_lock, &until);
    }
    return NULL;
}

static CUresult wake_executor(sim_device *device)
{
    if (!device->executor_started) {
        pthread_t thread;
        sigset_t all, before;
        /* The application's signals belong to its own threads. */
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        int failed = pthread_create(&thread, NULL, execute_for_ever, device);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (failed != 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
        pthread_detach(thread);
        device->executor_started = true;
    }
    pthread_cond_signal(&device->work);
    return CUDA_SUCCESS;
}

CUresult nvs_sim_enqueue(sim_stream *stream, const sim_work *work, bool counts, bool graph)
{
    sim_device *device = stream->context->device;
    sim_op *op;
    if (stream->context->error != CUDA_SUCCESS)
        return stream->context->error;
    while (counts && stream->launches >= nvs_sim_settings.launch_queue) /* as the driver: a full queue blocks the launch */
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
    op = spare_ops;
    if (op != NULL)
        spare_ops = op->next;
    else
        op = malloc(sizeof *op);
    if (op == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *op = (sim_op){.work = *work, .sequence = ++nvs_sim_sequence, .submitted_ns = nvs_sim_now_ns(), .counts = counts, .graph = graph};
    if (atomic_load_explicit(&nvs_sim_watcher, memory_order_acquire) != NULL) /* as in nvs_sim_enter */
        nvs_sim_mark(op);
    bool was_empty = stream->head == NULL;
    if (was_empty)
        stream->head = op;
    else
        stream->tail->next = op;
    stream->tail = op;
    stream->submitted++;
    stream->launches += counts;
    if (!stream->busy) {
        stream->busy = true;
        stream->next_busy = device->busy;
        device->busy = stream;
    }
    return was_empty ? wake_executor(device) : CUDA_SUCCESS;
}

CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work)
{
    if (stream->capture != NULL)
        return nvs_sim_capture_add(stream, work);
    CUresult result = nvs_sim_capture_implicit(stream);
    return result == CUDA_SUCCESS ? nvs_sim_enqueue(stream, work, work->kind == OP_KERNEL, false) : result;
}

void nvs_sim_stream_wait(sim_stream *stream)
{
    uint64_t target = stream->submitted, id = stream->id;
    while (stream->magic == SIM_STREAM && stream->id == id && stream->completed < target)
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

bool nvs_sim_stream_idle(sim_stream *stream) { return stream->head == NULL; }

CUresult nvs_sim_stream_create(sim_context *context, unsigned flags, int priority, sim_stream **out)
{
    sim_stream *stream = spare_streams;
    if (stream != NULL)
        spare_streams = stream->next;
    else
        stream = malloc(sizeof *stream);
    if (stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *stream = (sim_stream){.magic = SIM_STREAM, .context = context, .flags = flags, .priority = priority, .id = nvs_sim_next_id++};
    stream->next = context->streams;
    context->streams = stream;
    *out = stream;
    return CUDA_SUCCESS;
}

/* As cuStreamDestroy: returns at once, what was submitted still runs; the handle is dead from now on. */
void nvs_sim_stream_destroy(sim_stream *stream)
{
    free(stream->capture_tail);
    stream->capture_tail = NULL;
    stream->closing = true;
    if (!stream->busy)
        recycle_stream(stream);
}

static CUresult per_thread_stream(sim_context *context, sim_stream **out)
{
    uint64_t self = nvs_sim_thread_number();
    for (sim_stream *stream = context->streams; stream != NULL; stream = stream->next)
        if (stream->owner_thread == self) {
            *out = stream;
            return CUDA_SUCCESS;
        }
    CUresult result = nvs_sim_stream_create(context, CU_STREAM_DEFAULT, 0, out);
    if (result == CUDA_SUCCESS)
        (*out)->owner_thread = self;
    return result;
}

CUresult nvs_sim_stream(CUstream handle, sim_stream **out)
{
    bool per_thread = handle == CU_STREAM_PER_THREAD || (handle == NULL && nvs_sim_thread.call_per_thread);
    if (handle == NULL || handle == CU_STREAM_LEGACY || per_thread) {
        sim_context *context = nvs_sim_current();
        if (context == NULL)
            return nvs_sim_no_context();
        if (per_thread)
            return per_thread_stream(context, out);
        *out = context->default_stream;
        return CUDA_SUCCESS;
    }
    sim_stream *stream = (sim_stream *)(void *)handle;
    if (stream->magic != SIM_STREAM || stream->closing)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = stream;
    return stream->detached ? SIM_STREAM_DETACHED : CUDA_SUCCESS;
}
