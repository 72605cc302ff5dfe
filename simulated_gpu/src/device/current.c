/* Which context is current: the stack of each thread, and what becomes of one that ends while it is there, or before. */
#include "base/sim.h"

#include <signal.h>
#include <unistd.h>

sim_context *nvs_sim_current(void)
{
    sim_context *top = nvs_sim_thread.depth != 0 ? nvs_sim_thread.stack[nvs_sim_thread.depth - 1] : NULL;
    return top != NULL && nvs_sim_alive(top) ? top : NULL; /* NULL also when it was destroyed while current */
}

/* One that was made by cuCtxCreate and is not any more. */
static bool destroyed(const sim_context *context)
{
    return context->magic != SIM_CONTEXT && !context->primary && context->owner == NULL;
}

/* A primary one that was reset after a sticky error, and does not come back. */
static bool lost(const sim_context *context)
{
    return context->magic != SIM_CONTEXT && context->primary && context->device->error != CUDA_SUCCESS;
}

CUresult nvs_sim_no_context(void)
{
    const sim_context *top = nvs_sim_thread.depth != 0 ? nvs_sim_thread.stack[nvs_sim_thread.depth - 1] : NULL;
    return top != NULL && (destroyed(top) || lost(top)) ? CUDA_ERROR_CONTEXT_IS_DESTROYED : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult nvs_sim_push(sim_context *context)
{
    if (nvs_sim_thread.depth == sizeof nvs_sim_thread.stack / sizeof *nvs_sim_thread.stack)
        return CUDA_ERROR_OUT_OF_MEMORY;
    nvs_sim_thread.late[nvs_sim_thread.depth] = destroyed(context);
    nvs_sim_thread.stack[nvs_sim_thread.depth++] = context;
    return CUDA_SUCCESS;
}

/* A driver 580 takes a destroyed context for one that may be current, and crashes as soon as it is asked for its device, or popped. */
static bool may_be_current(CUcontext handle)
{
    sim_context *context = (sim_context *)(void *)handle;
    return nvs_sim_alive(context) || destroyed(context) || lost(context);
}

static void crash_if_late(void)
{
    if (nvs_sim_thread.depth == 0 || !nvs_sim_thread.late[nvs_sim_thread.depth - 1] || !destroyed(nvs_sim_thread.stack[nvs_sim_thread.depth - 1]))
        return;
    static const char why[] = "simulated GPU: the driver crashes here: a context was made current after its end\n";
    (void)!write(STDERR_FILENO, why, sizeof why - 1);
    (void)raise(SIGSEGV);
}

static CUresult push_handle(CUcontext handle)
{
    return handle != NULL && may_be_current(handle) ? nvs_sim_push((sim_context *)(void *)handle) : CUDA_ERROR_INVALID_CONTEXT;
}

static CUresult pop(CUcontext *out)
{
    crash_if_late();
    if (nvs_sim_thread.depth == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_context *top = nvs_sim_thread.stack[--nvs_sim_thread.depth];
    if (out != NULL)
        *out = (CUcontext)(void *)top;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxPushCurrent(CUcontext ctx)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(push_handle(ctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxPushCurrent_v2(CUcontext ctx)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(push_handle(ctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxPopCurrent(CUcontext *pctx)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(pop(pctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxPopCurrent_v2(CUcontext *pctx)
{
    NVS_SIM_ENTER();
    return nvs_sim_return(pop(pctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetCurrent(CUcontext ctx)
{
    NVS_SIM_ENTER();
    if (ctx == NULL) {
        if (nvs_sim_thread.depth != 0)
            nvs_sim_thread.depth--;
        return nvs_sim_return(CUDA_SUCCESS);
    }
    NVS_SIM_CHECK(may_be_current(ctx), CUDA_ERROR_INVALID_CONTEXT);
    if (nvs_sim_thread.depth != 0)
        nvs_sim_thread.depth--;
    return nvs_sim_return(nvs_sim_push((sim_context *)(void *)ctx));
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetCurrent(CUcontext *pctx)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pctx != NULL, CUDA_ERROR_INVALID_VALUE);
    *pctx = (CUcontext)(void *)nvs_sim_current();
    if (*pctx == NULL && nvs_sim_no_context() == CUDA_ERROR_CONTEXT_IS_DESTROYED)
        *pctx = (CUcontext)(void *)nvs_sim_thread.stack[nvs_sim_thread.depth - 1];
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetDevice(CUdevice *device)
{
    crash_if_late();
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    *device = context->device->ordinal;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx)
{
    sim_context *context;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(device != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_context(ctx, &context));
    *device = context->device->ordinal;
    return nvs_sim_return(CUDA_SUCCESS);
}
