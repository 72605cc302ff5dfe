/* Submission of a copy, and whether the host waits for it. */
#include "copy/copy.h"

#include <stdlib.h>
#include <string.h>

#define SNAPSHOT_BYTES (64u << 10)

static bool end_allowed(const sim_copy *copy, const sim_copy_end *end)
{
    const size_t bytes = nvs_sim_span(copy->width, copy->height, copy->depth, end->pitch, end->slice);
    return nvs_sim_copy_reaches(end->rights, (uintptr_t)end->start, bytes);
}

bool nvs_sim_copy_allowed(const sim_copy *copy) { return end_allowed(copy, &copy->target) && end_allowed(copy, &copy->source); }

bool nvs_sim_pageable(const void *pointer)
{
    return nvs_sim_find((uintptr_t)pointer) == NULL && !nvs_sim_reserved((uintptr_t)pointer, 1);
}

CUresult nvs_sim_copy_stream(CUstream handle, bool asynchronous, sim_stream **out)
{
    NVS_SIM_CHECK(asynchronous || nvs_sim_current() != NULL, nvs_sim_no_context());
    if (!asynchronous)
        NVS_SIM_TRY(nvs_sim_capture_unsafe());
    return nvs_sim_stream(handle, out);
}

/* An asynchronous copy waits for pageable memory, unless a snapshot of a small source can be taken. */
static bool must_wait(sim_copy *copy, size_t bytes)
{
    if (nvs_sim_pageable(copy->target.start))
        return true;
    if (!nvs_sim_pageable(copy->source.start))
        return false;
    const bool flat = copy->height == 1 && copy->depth == 1;
    if (!flat || bytes > SNAPSHOT_BYTES || (copy->snapshot = malloc(bytes)) == NULL)
        return true;
    memcpy(copy->snapshot, copy->source.start, bytes);
    copy->source.start = copy->snapshot;
    return false;
}

CUresult nvs_sim_copy_submit(sim_stream *stream, sim_copy *copy, enum sim_waiting waiting)
{
    sim_context *context = stream->context;
    const size_t bytes = copy->width * copy->height * copy->depth;
    if (context->error != CUDA_SUCCESS || bytes == 0)
        return context->error;
    if (copy->target.rights == NULL)
        copy->target.rights = context->device;
    if (copy->source.rights == NULL)
        copy->source.rights = context->device;
    if (copy->target.start == NULL || copy->source.start == NULL || !nvs_sim_copy_allowed(copy)) /* as the driver, at submission */
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
