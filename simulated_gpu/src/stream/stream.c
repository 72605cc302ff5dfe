/* Streams as objects: creation, the default streams, handles. */
#include "stream/stream.h"

#include <stdlib.h>

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

static CUresult per_thread_stream(sim_context *context, sim_stream **out)
{
    uint64_t self = nvs_sim_thread_number();
    for (sim_stream *stream = context->streams.all; stream != NULL; stream = stream->next)
        if (stream->owner_thread == self) {
            *out = stream;
            return CUDA_SUCCESS;
        }
    NVS_SIM_TRY(nvs_sim_stream_create(context, CU_STREAM_DEFAULT, 0, out));
    (*out)->owner_thread = self;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_stream(CUstream handle, sim_stream **out)
{
    bool per_thread = handle == CU_STREAM_PER_THREAD || (handle == NULL && nvs_sim_thread.per_thread);
    if (handle == NULL || handle == CU_STREAM_LEGACY || per_thread) {
        sim_context *context = nvs_sim_current();
        if (context == NULL)
            return nvs_sim_no_context();
        if (per_thread)
            return per_thread_stream(context, out);
        *out = context->streams.legacy;
        return CUDA_SUCCESS;
    }
    sim_stream *stream = (sim_stream *)(void *)handle;
    if (stream->magic != SIM_STREAM || stream->closing)
        return CUDA_ERROR_INVALID_HANDLE;
    *out = stream;
    return stream->detached ? SIM_STREAM_DETACHED : CUDA_SUCCESS;
}
