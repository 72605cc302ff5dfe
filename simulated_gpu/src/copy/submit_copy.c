/* Submission of a copy, and whether the host waits for it. */
#include "copy/copy.h"

#include <stdlib.h>
#include <string.h>

#define SNAPSHOT_BYTES (64u << 10)

bool nvs_sim_copy_allowed(const sim_copy *copy)
{
    const size_t to = nvs_sim_span(copy->width, copy->height, copy->depth, copy->target_pitch, copy->target_slice);
    const size_t from = nvs_sim_span(copy->width, copy->height, copy->depth, copy->source_pitch, copy->source_slice);
    return nvs_sim_copy_reaches(copy->target_by, (uintptr_t)copy->target, to) &&
           nvs_sim_copy_reaches(copy->source_by, (uintptr_t)copy->source, from);
}

bool nvs_sim_pageable(const void *pointer)
{
    return nvs_sim_find((uintptr_t)pointer) == NULL && !nvs_sim_reserved((uintptr_t)pointer, 1);
}

CUresult nvs_sim_copy_stream(CUstream handle, bool asynchronous, sim_stream **out)
{
    if (!asynchronous && nvs_sim_current() == NULL)
        return nvs_sim_no_context();
    NVS_SIM_TRY(asynchronous ? CUDA_SUCCESS : nvs_sim_capture_unsafe());
    return nvs_sim_stream(handle, out);
}

/* An asynchronous copy waits for pageable memory, except that it takes a snapshot of a small source. */
static bool must_wait(sim_copy *copy, size_t bytes)
{
    if (nvs_sim_pageable(copy->target))
        return true;
    if (!nvs_sim_pageable(copy->source))
        return false;
    const bool flat = copy->height == 1 && copy->depth == 1;
    if (!flat || bytes > SNAPSHOT_BYTES || (copy->snapshot = malloc(bytes)) == NULL)
        return true;
    memcpy(copy->snapshot, copy->source, bytes);
    copy->source = copy->snapshot;
    return false;
}

CUresult nvs_sim_copy_submit(sim_stream *stream, sim_copy *copy, enum sim_waiting waiting)
{
    sim_context *context = stream->context;
    const size_t bytes = copy->width * copy->height * copy->depth;
    if (context->error != CUDA_SUCCESS || bytes == 0)
        return context->error;
    if (copy->target_by == NULL)
        copy->target_by = context->device;
    if (copy->source_by == NULL)
        copy->source_by = context->device;
    if (copy->target == NULL || copy->source == NULL || !nvs_sim_copy_allowed(copy)) /* as the driver, at submission */
        return CUDA_ERROR_INVALID_VALUE;
    bool wait = waiting == SIM_ALWAYS_WAIT;
    if (waiting == SIM_WAIT_AS_ASYNC && stream->capture.of == NULL)
        wait = must_wait(copy, bytes);
    sim_work work = {.kind = OP_COPY, .bytes = bytes, .duration_ns = nvs_sim_copy_ns(bytes), .u.copy = *copy};
    CUresult result = nvs_sim_submit(stream, &work);
    if (result != CUDA_SUCCESS) {
        free(copy->snapshot);
        return result;
    }
    if (!wait)
        return CUDA_SUCCESS;
    nvs_sim_stream_wait(stream);
    return context->error;
}
