/* The effect of work on memory, when the work ends.  Runs on the executor with the lock; drops it while many bytes move. */
#include "memory/memory.h"

#include <string.h>

#define UNLOCKED_FROM (64u << 10)

static uint32_t transfers; /* effects that move bytes without the lock */

static void begin_transfer(void)
{
    transfers++;
    pthread_mutex_unlock(&nvs_sim_lock);
}

static void end_transfer(void)
{
    pthread_mutex_lock(&nvs_sim_lock);
    if (--transfers == 0)
        pthread_cond_broadcast(&nvs_sim_done);
}

void nvs_sim_transfers_wait(void)
{
    while (transfers != 0)
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

static bool end_allowed(const sim_copy *copy, const sim_copy_end *end)
{
    const size_t bytes = nvs_sim_span(copy->width, copy->height, copy->depth, end->pitch, end->slice);
    return nvs_sim_copy_reaches(end->rights, (uintptr_t)end->start, bytes);
}

bool nvs_sim_copy_allowed(const sim_copy *copy) { return end_allowed(copy, &copy->target) && end_allowed(copy, &copy->source); }

static CUresult copy(const sim_copy *c)
{
    const bool unlocked = c->width * c->height * c->depth >= UNLOCKED_FROM;
    if (!nvs_sim_copy_allowed(c))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (unlocked)
        begin_transfer();
    for (size_t z = 0; z < c->depth; z++)
        for (size_t y = 0; y < c->height; y++)
            memmove(c->target.start + z * c->target.slice + y * c->target.pitch,
                    c->source.start + z * c->source.slice + y * c->source.pitch, c->width);
    if (unlocked)
        end_transfer();
    return CUDA_SUCCESS;
}

static CUresult fill(const sim_fill *f)
{
    bool unlocked = f->width * f->height * f->element >= UNLOCKED_FROM;
    if (!nvs_sim_copy_reaches(f->rights, (uintptr_t)f->target, nvs_sim_fill_span(f)))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    if (unlocked)
        begin_transfer();
    for (size_t y = 0; y < f->height; y++) {
        char *row = f->target + y * f->pitch;
        if (f->element == 1)
            memset(row, (int)f->value, f->width);
        else
            for (size_t x = 0; x < f->width; x++)
                memcpy(row + x * f->element, &f->value, f->element); /* host and card are little-endian */
    }
    if (unlocked)
        end_transfer();
    return CUDA_SUCCESS;
}

/* nvs_copy, the only kernel that touches memory. */
static CUresult kernel_copy(const sim_context *launched_in, const sim_kernel *kernel)
{
    const bool own = kernel->context != NULL && kernel->context->magic == SIM_CONTEXT;
    const sim_context *by = own ? kernel->context : launched_in;
    if (!nvs_sim_kernel_reaches(by, (uintptr_t)kernel->to, kernel->bytes) ||
        !nvs_sim_kernel_reaches(by, (uintptr_t)kernel->from, kernel->bytes))
        return CUDA_ERROR_ILLEGAL_ADDRESS;
    memmove((void *)(uintptr_t)kernel->to, (const void *)(uintptr_t)kernel->from, kernel->bytes);
    return CUDA_SUCCESS;
}

bool nvs_sim_value_reached(const sim_stream *stream, const sim_value *wanted)
{
    uint64_t found = 0;
    if (!nvs_sim_kernel_reaches(stream->context, (uintptr_t)wanted->pointer, wanted->bytes))
        return true; /* the operation ends, with an error */
    memcpy(&found, (const void *)(uintptr_t)wanted->pointer, wanted->bytes);
    switch (wanted->compare & 3) {
    case CU_STREAM_WAIT_VALUE_GEQ: return wanted->bytes == 4 ? (int32_t)(found - wanted->value) >= 0 : (int64_t)(found - wanted->value) >= 0;
    case CU_STREAM_WAIT_VALUE_EQ: return found == wanted->value;
    case CU_STREAM_WAIT_VALUE_AND: return (found & wanted->value) != 0;
    default: return (uint64_t)(wanted->bytes == 4 ? (uint32_t)~(found | wanted->value) : ~(found | wanted->value)) != 0;
    }
}

CUresult nvs_sim_effect(sim_stream *stream, const sim_work *work)
{
    sim_device *device = stream->context->device;
    const sim_fill *f = &work->u.fill;
    switch (work->kind) {
    case OP_KERNEL:
        nvs_sim_managed_touch(device);
        return work->u.kernel.bytes == 0 ? CUDA_SUCCESS : kernel_copy(stream->context, &work->u.kernel);
    case OP_COPY:
        return copy(&work->u.copy);
    case OP_FILL:
        nvs_sim_managed_prefetch((CUdeviceptr)(uintptr_t)f->target, nvs_sim_fill_span(f), (int32_t)device->gpu);
        return fill(f);
    case OP_PREFETCH:
        nvs_sim_managed_prefetch(work->u.prefetch.pointer, work->u.prefetch.bytes, work->u.prefetch.gpu);
        return CUDA_SUCCESS;
    case OP_FREE:
        if (nvs_sim_graph_memory_at(work->u.pointer) == NULL) /* the memory of a graph was freed at submission */
            nvs_sim_release((uintptr_t)work->u.pointer);
        return CUDA_SUCCESS;
    case OP_WRITE_VALUE:
        if (!nvs_sim_kernel_reaches(stream->context, (uintptr_t)work->u.value.pointer, work->u.value.bytes))
            return CUDA_ERROR_ILLEGAL_ADDRESS;
        memcpy((void *)(uintptr_t)work->u.value.pointer, &work->u.value.value, work->u.value.bytes);
        return CUDA_SUCCESS;
    case OP_WAIT_VALUE:
        return nvs_sim_kernel_reaches(stream->context, (uintptr_t)work->u.value.pointer, work->u.value.bytes) ? CUDA_SUCCESS
                                                                                                              : CUDA_ERROR_ILLEGAL_ADDRESS;
    default:
        return CUDA_SUCCESS;
    }
}
