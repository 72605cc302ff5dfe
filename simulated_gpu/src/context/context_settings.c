/* What a context only remembers: flags, limits, cache preferences, identity. */
#include "base/sim.h"

SIM_EXPORT CUresult CUDAAPI cuCtxGetFlags(unsigned int *flags)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(flags != NULL, CUDA_ERROR_INVALID_VALUE);
    *flags = context->flags;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetFlags(unsigned int flags)
{
    NVS_SIM_ENTER_CONTEXT();
    context->flags = flags;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetId(CUcontext ctx, unsigned long long *ctxId)
{
    sim_context *context;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(ctxId != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_context(ctx, &context));
    *ctxId = context->id;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    sim_context *context;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(version != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_context(ctx, &context));
    *version = 3020;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetLimit(CUlimit limit, size_t value)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK((unsigned)limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    context->limits[limit] = value;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetLimit(size_t *pvalue, CUlimit limit)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pvalue != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((unsigned)limit < CU_LIMIT_MAX, CUDA_ERROR_UNSUPPORTED_LIMIT);
    *pvalue = context->limits[limit];
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetCacheConfig(CUfunc_cache *pconfig)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pconfig != NULL, CUDA_ERROR_INVALID_VALUE);
    *pconfig = context->cache;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetCacheConfig(CUfunc_cache config)
{
    NVS_SIM_ENTER_CONTEXT();
    context->cache = config;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetSharedMemConfig(CUsharedconfig *pConfig)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(pConfig != NULL, CUDA_ERROR_INVALID_VALUE);
    *pConfig = context->shared_config;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxSetSharedMemConfig(CUsharedconfig config)
{
    NVS_SIM_ENTER_CONTEXT();
    context->shared_config = config;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxGetStreamPriorityRange(int *leastPriority, int *greatestPriority)
{
    NVS_SIM_ENTER_CONTEXT();
    if (leastPriority != NULL)
        *leastPriority = 0;
    if (greatestPriority != NULL)
        *greatestPriority = -5;
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuCtxResetPersistingL2Cache(void)
{
    NVS_SIM_ENTER_CONTEXT();
    return nvs_sim_return(context->error);
}
