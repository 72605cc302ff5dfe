/* Opening and closing a context, with its contents. */
#include "context/context.h"

#include <stdlib.h>
#include <string.h>

static sim_context *spare; /* destroyed contexts; readable, to recognise stale handles */

sim_context *nvs_sim_context_new(void)
{
    sim_context *context = spare;
    if (context != NULL)
        spare = context->next;
    else
        context = malloc(sizeof *context);
    if (context != NULL)
        memset(context, 0, sizeof *context);
    return context;
}

void nvs_sim_context_free(sim_context *context)
{
    context->next = spare;
    spare = context;
}

CUresult nvs_sim_context_open(sim_context *context, sim_device *device, unsigned flags)
{
    if (device->error != CUDA_SUCCESS)
        return device->error;
    if (nvs_sim_settings.context_bytes != 0 && context->owner == NULL && !nvs_sim_charge(device->gpu, nvs_sim_settings.context_bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    context->magic = SIM_CONTEXT;
    context->device = device;
    context->settings.flags = flags;
    context->id = nvs_sim_next_id++;
    context->error = CUDA_SUCCESS;
    context->peers = 0;
    context->settings.limits[CU_LIMIT_STACK_SIZE] = 1024;
    context->settings.limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 1048576;
    context->settings.limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8388608;
    context->settings.limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    context->settings.limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 64;
    NVS_SIM_TRY(nvs_sim_stream_create(context, CU_STREAM_DEFAULT, 0, &context->streams.legacy));
    context->next = device->contexts;
    device->contexts = context;
    nvs_sim_attach(device->gpu, 1);
    return CUDA_SUCCESS;
}

/* Calls the destructors of the storage that libcudart has attached. */
static void free_storage(sim_context *context)
{
    while (context->storage != NULL) {
        sim_storage *storage = context->storage;
        context->storage = storage->next;
        if (storage->destroy != NULL) {
            pthread_mutex_unlock(&nvs_sim_lock);
            storage->destroy((CUcontext)(void *)context, storage->key, storage->value);
            pthread_mutex_lock(&nvs_sim_lock);
        }
        free(storage);
    }
}

static void release_memory(sim_context *context)
{
    for (size_t i = nvs_sim_allocation_count(); i-- > 0;) {
        const sim_allocation *allocation = nvs_sim_allocation_at(i);
        if (allocation->context == context && allocation->kind != MEM_REGISTERED && allocation->kind != MEM_MAPPED)
            nvs_sim_release(allocation->base);
    }
}

static void destroy_streams(sim_context *context)
{
    for (sim_stream *stream = context->streams.all, *next; stream != NULL; stream = next) {
        next = stream->next;
        nvs_sim_stream_destroy(stream);
    }
    while (context->streams.all != NULL) /* an idle stream may still be in the executor's list */
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

void nvs_sim_context_close(sim_context *context)
{
    sim_device *device = context->device;
    sim_context **link = &device->contexts;
    nvs_sim_context_wait(context, NULL);
    free_storage(context);
    nvs_sim_context_wait(context, NULL);
    release_memory(context);
    nvs_sim_capture_end_all(context);
    destroy_streams(context);
    nvs_sim_modules_unload(context);
    while (*link != context)
        link = &(*link)->next;
    *link = context->next;
    nvs_sim_graph_memory_trim(device);
    if (nvs_sim_settings.context_bytes != 0 && context->owner == NULL)
        nvs_sim_uncharge(device->gpu, nvs_sim_settings.context_bytes);
    nvs_sim_attach(device->gpu, -1);
    context->magic = 0;
    context->streams.legacy = context->streams.graph = NULL;
}
