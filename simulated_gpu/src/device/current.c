/* From a handle to a context or stream: opening them, the current contexts of each thread, and the default streams.
 *
 * Each thread has a stack of current contexts.  The next use of a retained primary context reopens it after a reset.
 * The memory of destroyed contexts and streams stays readable, to recognise stale handles.
 */
#include "stream/stream.h"

#include <signal.h>
#include <unistd.h>

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

/* The stack of current contexts of each thread, and the rules for destroyed contexts. */

enum { STACK_DEPTH = 32 };

static _Thread_local struct {
    sim_context *contexts[STACK_DEPTH];
    bool stale[STACK_DEPTH]; /* the context was already destroyed when it was pushed */
    unsigned depth;
} stack;

static sim_context *top(void) { return stack.depth != 0 ? stack.contexts[stack.depth - 1] : NULL; }

/* The next use of a retained primary context reopens it after a reset. */
static bool alive(sim_context *context)
{
    const bool was_reset = context->magic != SIM_CONTEXT && context->references != 0 && nvs_sim_is_primary(context);
    return context->magic == SIM_CONTEXT ||
           (was_reset && nvs_sim_context_open(context, context->device, context->settings.flags) == CUDA_SUCCESS);
}

sim_context *nvs_sim_current(void)
{
    sim_context *context = top();
    return context != NULL && alive(context) ? context : NULL; /* NULL also after it was destroyed while current */
}

CUresult nvs_sim_context(CUcontext handle, sim_context **out)
{
    sim_context *context = handle == NULL ? nvs_sim_current() : (sim_context *)(void *)handle;
    if (context == NULL || !alive(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    *out = context;
    return CUDA_SUCCESS;
}

/* A context of cuCtxCreate that was destroyed. */
static bool destroyed(const sim_context *context)
{
    return context->magic != SIM_CONTEXT && !nvs_sim_is_primary(context) && context->owner == NULL;
}

/* A primary context that was reset after a sticky error cannot be reopened. */
static bool lost(const sim_context *context)
{
    return context->magic != SIM_CONTEXT && nvs_sim_is_primary(context) && context->device->error != CUDA_SUCCESS;
}

/* The error for a thread without a current context. */
static CUresult no_context(void)
{
    const sim_context *context = top();
    return context != NULL && (destroyed(context) || lost(context)) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult nvs_sim_need_current(sim_context **out)
{
    *out = nvs_sim_current();
    return *out != NULL ? CUDA_SUCCESS : no_context();
}

CUresult nvs_sim_push(sim_context *context)
{
    if (stack.depth == STACK_DEPTH)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stack.stale[stack.depth] = destroyed(context);
    stack.contexts[stack.depth++] = context;
    return CUDA_SUCCESS;
}

void nvs_sim_pop_if_current(const sim_context *context)
{
    if (stack.depth != 0 && top() == context)
        stack.depth--;
}

/* Driver 580 accepts a destroyed context as current, and crashes when that context is popped or asked for its device. */
static bool can_be_current(CUcontext handle)
{
    sim_context *context = (sim_context *)(void *)handle;
    return alive(context) || destroyed(context) || lost(context);
}

static void crash_if_stale(void)
{
    if (stack.depth == 0 || !stack.stale[stack.depth - 1] || !destroyed(top()))
        return;
    static const char why[] = "simulated GPU: the driver crashes here: a context was made current after it was destroyed\n";
    (void)!write(STDERR_FILENO, why, sizeof why - 1);
    (void)raise(SIGSEGV);
}

static CUresult push_handle(CUcontext handle)
{
    return handle != NULL && can_be_current(handle) ? nvs_sim_push((sim_context *)(void *)handle) : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult pop(CUcontext *out)
{
    crash_if_stale();
    if (stack.depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_context *context = stack.contexts[--stack.depth];
    if (out != NULL)
        *out = (CUcontext)(void *)context;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuCtxPushCurrent, (CUcontext ctx), push_handle(ctx))
NVS_SIM_ENTRY(cuCtxPushCurrent_v2, (CUcontext ctx), push_handle(ctx))
NVS_SIM_ENTRY(cuCtxPopCurrent, (CUcontext *pctx), pop(pctx))
NVS_SIM_ENTRY(cuCtxPopCurrent_v2, (CUcontext *pctx), pop(pctx))

SIM_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx)
{
    NVS_SIM_ENTER();
    if (ctx == NULL) {
        if (stack.depth != 0)
            stack.depth--;
        return CUDA_SUCCESS;
    }
    NVS_SIM_CHECK(can_be_current(ctx), CUDA_ERROR_INVALID_CONTEXT);
    if (stack.depth != 0)
        stack.depth--;
    return nvs_sim_push((sim_context *)(void *)ctx);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *pctx)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pctx = (CUcontext)(void *)nvs_sim_current();
    if (*pctx == NULL && no_context() == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        *pctx = (CUcontext)(void *)top();
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
    crash_if_stale();
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    *device = context->device->ordinal;
    return CUDA_SUCCESS;
}

NVS_SIM_GETTER(cuCtxGetDevice_v2, (CUdevice *device, CUcontext ctx), sim_context *context, nvs_sim_context(ctx, &context), device,
               context->device->ordinal)

/* Handles of streams. */

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
        sim_context *context;
        NVS_SIM_TRY(nvs_sim_need_current(&context));
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
