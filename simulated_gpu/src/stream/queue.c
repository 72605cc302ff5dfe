/* Streams as objects, and their queued work as data: durations, fences, waits. */
#include "stream/stream.h"

#include <stdlib.h>

uint64_t nvs_sim_sequence;

static sim_stream *spare; /* destroyed streams, which stay readable */

uint64_t nvs_sim_thread_number(void)
{
    static uint64_t count;
    static _Thread_local uint64_t number;
    if (number == 0)
        number = ++count;
    return number;
}

void nvs_sim_stream_recycle(sim_stream *stream)
{
    sim_stream **link = &stream->context->streams.all;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
    stream->magic = 0;
    stream->next = spare;
    spare = stream;
}

CUresult nvs_sim_stream_create(sim_context *context, unsigned flags, int priority, sim_stream **out)
{
    sim_stream *stream = spare;
    if (stream != NULL)
        spare = stream->next;
    else
        stream = malloc(sizeof *stream);
    if (stream == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *stream = (sim_stream){.magic = SIM_STREAM, .context = context, .flags = flags, .priority = priority, .id = nvs_sim_next_id++};
    stream->next = context->streams.all;
    context->streams.all = stream;
    *out = stream;
    return CUDA_SUCCESS;
}

void nvs_sim_stream_destroy(sim_stream *stream)
{
    free(stream->capture.tail.all);
    stream->capture.tail = (sim_nodes){0};
    stream->closing = true;
    if (!stream->queue.busy)
        nvs_sim_stream_recycle(stream);
}

#define COPY_LATENCY_NS 5000u

uint64_t nvs_sim_copy_ns(uint64_t bytes)
{
    double rate = nvs_sim_settings.copy_bytes_per_ns;
    return rate == 0 ? 0 : COPY_LATENCY_NS + (uint64_t)((double)bytes / rate);
}

sim_fence *nvs_sim_fence_new(void)
{
    sim_fence *fence = calloc(1, sizeof *fence);
    if (fence != NULL)
        fence->references = 1;
    return fence;
}

void nvs_sim_fence_unref(sim_fence *fence)
{
    if (fence != NULL && --fence->references == 0)
        free(fence);
}

void nvs_sim_discard(const sim_work *work)
{
    if (work->kind == OP_COPY)
        free(work->u.copy.snapshot);
    else if (work->kind == OP_RECORD || work->kind == OP_WAIT)
        nvs_sim_fence_unref(work->u.fence);
}

void nvs_sim_event_reset(sim_event *event)
{
    nvs_sim_fence_unref(event->fence);
    free(event->nodes.all);
    event->fence = NULL;
    event->nodes = (sim_nodes){0};
    event->capture_id = 0;
}

sim_fence *nvs_sim_event_begin(sim_event *event)
{
    sim_fence *fence = nvs_sim_fence_new();
    if (fence == NULL)
        return NULL;
    nvs_sim_event_reset(event);
    event->fence = fence;
    fence->references++;
    return fence;
}

void nvs_sim_stream_wait(sim_stream *stream)
{
    const uint64_t last = stream->queue.tail != NULL ? stream->queue.tail->sequence : 0, id = stream->id;
    while (stream->magic == SIM_STREAM && stream->id == id && stream->queue.head != NULL && stream->queue.head->sequence <= last)
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

static bool done_until(const sim_context *context, const sim_stream *except, uint64_t last)
{
    if (context->magic == SIM_CONTEXT)
        for (const sim_stream *stream = context->streams.all; stream != NULL; stream = stream->next)
            if (stream != except && stream->queue.head != NULL && stream->queue.head->sequence <= last)
                return false;
    return true;
}

void nvs_sim_context_wait(sim_context *context, const sim_stream *except)
{
    const uint64_t last = nvs_sim_sequence;
    while (!done_until(context, except, last))
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

void nvs_sim_device_wait(sim_device *device)
{
    for (sim_context *context = device->contexts; context != NULL; context = context->next)
        nvs_sim_context_wait(context, NULL);
}
