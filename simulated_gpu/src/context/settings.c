/* Flags and limits of a context, and calls without effect. */
#include "context/context.h"

SIM_EXPORT CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = context->settings.flags;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetFlags(unsigned int flags)
{
    NVS_SIM_ENTER_CONTEXT();
    context->settings.flags = flags;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)
{
    NVS_SIM_ENTER_FIND(sim_context *context, nvs_sim_context(ctx, &context));
    NVS_SIM_CHECK(ctxId != NULL, CUDA_ERROR_INVALID_VALUE);
    *ctxId = context->id;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    NVS_SIM_ENTER_FIND(sim_context *context, nvs_sim_context(ctx, &context));
    NVS_SIM_CHECK(version != NULL, CUDA_ERROR_INVALID_VALUE);
    *version = 3020;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK((unsigned)limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    context->settings.limits[limit] = value;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pvalue != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((unsigned)limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *pvalue = context->settings.limits[limit];
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    NVS_SIM_ENTER_CONTEXT();
    if (leastPriority != NULL)
        *leastPriority = 0;
    if (greatestPriority != NULL)
        *greatestPriority = -5;
    return CUDA_SUCCESS;
}

/* cudaProfiler.h, which declares these two, is not in every wheel. */
SIM_EXPORT CUresult CUDAAPI cuProfilerStart(void);
SIM_EXPORT CUresult CUDAAPI cuProfilerStop(void);

#define NO_EFFECT(name, parameters)                                                             \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER_CONTEXT();                                                                \
        return context->error;                                                                  \
    }

NO_EFFECT(cuCtxSetCacheConfig, (CUfunc_cache config))
NO_EFFECT(cuCtxSetSharedMemConfig, (CUsharedconfig config))
NO_EFFECT(cuProfilerStart, (void))
NO_EFFECT(cuProfilerStop, (void))
