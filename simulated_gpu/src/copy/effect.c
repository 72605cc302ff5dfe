/* What work does when it ends.  Runs on the executor with the lock; drops it for callbacks and for many bytes. */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>

#define UNLOCKED_FROM (64u << 10)

uint32_t nvs_sim_effects_unlocked;

static void unlock(void)
{
    nvs_sim_effects_unlocked++;
    pthread_mutex_unlock(&nvs_sim_lock);
}

static void lock(void)
{
    pthread_mutex_lock(&nvs_sim_lock);
    if (--nvs_sim_effects_unlocked == 0)
        pthread_cond_broadcast(&nvs_sim_done);
}

static size_t span(size_t width, size_t height, size_t depth, size_t pitch, size_t slice)
{
    if (width == 0 || height == 0 || depth == 0)
        return 0;
    return (depth - 1) * slice + (height - 1) * pitch + width;
}

static CUresult copy(const sim_copy *c)
{
    bool unlocked = c->width * c->height * c->depth >= UNLOCKED_FROM;
    size_t to = span(c->width, c->height, c->depth, c->target_pitch, c->target_slice);
    size_t from = span(c->width, c->height, c->depth, c->source_pitch, c->source_slice);
    if (!nvs_sim_copy_reaches(c->target_by, (uintptr_t)c->target, to) || !nvs_sim_copy_reaches(c->source_by, (uintptr_t)c->source, from))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (unlocked)
        unlock();
    for (size_t z = 0; z < c->depth; z++)
        for (size_t y = 0; y < c->height; y++)
            memmove(c->target + z * c->target_slice + y * c->target_pitch,
                    c->source + z * c->source_slice + y * c->source_pitch, c->width);
    if (unlocked)
        lock();
    return CUDA_SUCCESS;
}

static CUresult fill(const sim_fill *f)
{
    bool unlocked = f->width * f->height * f->element >= UNLOCKED_FROM;
    if (!nvs_sim_copy_reaches(f->by, (uintptr_t)f->target, span(f->width * f->element, f->height, 1, f->pitch, 0)))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (unlocked)
        unlock();
    for (size_t y = 0; y < f->height; y++) {
        char *row = f->target + y * f->pitch;
        if (f->element == 1)
            memset(row, (int)f->value, f->width);
        else
            for (size_t x = 0; x < f->width; x++)
                memcpy(row + x * f->element, &f->value, f->element); /* little endian, as the card */
    }
    if (unlocked)
        lock();
    return CUDA_SUCCESS;
}

/* What nvs_copy does: the only kernel that touches memory. */
static CUresult kernel_copy(const sim_context *launched_in, const sim_work *work)
{
    const sim_context *by = work->u.by != NULL && work->u.by->magic == SIM_CONTEXT ? work->u.by : launched_in;
    if (!nvs_sim_kernel_reaches(by, (uintptr_t)work->u.to, work->u.bytes) || !nvs_sim_kernel_reaches(by, (uintptr_t)work->u.from, work->u.bytes))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove((void *)(uintptr_t)work->u.to, (const void *)(uintptr_t)work->u.from, work->u.bytes);
    return CUDA_SUCCESS;
}

CUresult nvs_sim_execute(sim_stream *stream, const sim_work *work, uint64_t end_ns)
{
    sim_device *device = stream->context->device;
    switch (work->kind) {
    case OP_EMPTY:
    case OP_WAIT:
    case OP_ALLOCATE:
        return CUDA_SUCCESS;
    case OP_KERNEL:
        nvs_sim_managed_touch(device);
        return work->u.bytes == 0 ? CUDA_SUCCESS : kernel_copy(stream->context, work);
    case OP_COPY:
        return copy(&work->u.copy);
    case OP_FILL:
        nvs_sim_managed_prefetch((CUdeviceptr)(uintptr_t)work->u.fill.target,
                                 span(work->u.fill.width * work->u.fill.element, work->u.fill.height, 1, work->u.fill.pitch, 0),
                                 (int32_t)device->gpu);
        return fill(&work->u.fill);
    case OP_HOST:
        pthread_mutex_unlock(&nvs_sim_lock);
        nvs_sim_thread.in_callback = true;
        work->u.host.function(work->u.host.data);
        nvs_sim_thread.in_callback = false;
        pthread_mutex_lock(&nvs_sim_lock);
        return CUDA_SUCCESS;
    case OP_CALLBACK:
        pthread_mutex_unlock(&nvs_sim_lock);
        nvs_sim_thread.in_callback = true;
        work->u.host.callback(work->u.host.stream, CUDA_SUCCESS, work->u.host.data);
        nvs_sim_thread.in_callback = false;
        pthread_mutex_lock(&nvs_sim_lock);
        return CUDA_SUCCESS;
    case OP_RECORD:
        work->u.fence->done = true;
        work->u.fence->end_ns = end_ns;
        return CUDA_SUCCESS;
    case OP_PREFETCH:
        nvs_sim_managed_prefetch(work->u.prefetch.pointer, work->u.prefetch.bytes, work->u.prefetch.gpu);
        return CUDA_SUCCESS;
    case OP_FREE:
        if (nvs_sim_graph_memory_at(work->u.pointer) == NULL) /* a graph's was freed when this was queued */
            nvs_sim_release((uintptr_t)work->u.pointer);
        return CUDA_SUCCESS;
    case OP_WRITE_VALUE:
        if (!nvs_sim_kernel_reaches(stream->context, (uintptr_t)work->u.write.pointer, work->u.write.bytes))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        memcpy((void *)(uintptr_t)work->u.write.pointer, &work->u.write.value, work->u.write.bytes);
        return CUDA_SUCCESS;
    }
    return CUDA_SUCCESS;
}

void nvs_sim_discard(sim_work *work)
{
    if (work->kind == OP_COPY) {
        free(work->u.copy.snapshot);
        work->u.copy.snapshot = NULL;
    } else if (work->kind == OP_RECORD || work->kind == OP_WAIT) {
        nvs_sim_fence_unref(work->u.fence);
        work->u.fence = NULL;
    }
}
