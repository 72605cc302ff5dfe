/* Kernels: launches, attributes, occupancy.
 *
 * A kernel takes time and computes nothing.  Four kernels have a model (enum sim_kernel_model).  Occupancy is by threads alone: the
 * registers and the shared memory of an image are not known.
 */
#include "module/module.h"

#include <string.h>

/* Reads the first `count` parameters, of 8 bytes each.  False: the launch has no parameters. */
static bool read_parameters(const CUDA_KERNEL_NODE_PARAMS *launch, uint64_t *out, size_t count)
{
    for (size_t i = 0; launch->kernelParams != NULL && i < count; i++) {
        if (launch->kernelParams[i] == NULL)
            return false;
        memcpy(&out[i], launch->kernelParams[i], sizeof out[i]);
    }
    bool found = launch->kernelParams != NULL;
    for (size_t i = 0; launch->extra != NULL && launch->extra[i] != CU_LAUNCH_PARAM_END; i += 2)
        if (launch->extra[i] == CU_LAUNCH_PARAM_BUFFER_POINTER) {
            memcpy(out, launch->extra[i + 1], count * sizeof *out);
            found = true;
        }
    return found;
}

CUresult nvs_sim_kernel_work(const CUDA_KERNEL_NODE_PARAMS *launch, sim_work *out)
{
    const unsigned grid[3] = {launch->gridDimX, launch->gridDimY, launch->gridDimZ};
    const unsigned block[3] = {launch->blockDimX, launch->blockDimY, launch->blockDimZ};
    sim_function *function;
    NVS_SIM_TRY(nvs_sim_function(launch->func != NULL ? launch->func : (CUfunction)launch->kern, &function));
    for (int i = 0; i < 3; i++)
        if (grid[i] == 0 || block[i] == 0)
            return CUDA_ERROR_INVALID_VALUE;
    if ((uint64_t)block[0] * block[1] * block[2] > 1024 || grid[0] > 2147483647u || grid[1] > 65535 || grid[2] > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t given[3] = {0};
    *out = (sim_work){.kind = OP_KERNEL, .duration_ns = nvs_sim_settings.kernel_ns, .u.kernel = {.demand = nvs_sim_settings.demand}};
    static const size_t parameters[] = {[KERNEL_BUSY] = 1, [KERNEL_PART] = 2, [KERNEL_CALL] = 2, [KERNEL_COPY] = 3};
    if (function->model == KERNEL_OPAQUE || !read_parameters(launch, given, parameters[function->model]))
        return CUDA_SUCCESS;
    if (function->model == KERNEL_COPY) {
        out->u.kernel.to = given[0];
        out->u.kernel.from = given[1];
        out->u.kernel.bytes = 4 * given[2];
        return CUDA_SUCCESS;
    }
    if (function->model == KERNEL_CALL) {
        *out = (sim_work){.kind = OP_HOST, .u.host = {.function = (CUhostFn)(uintptr_t)given[0], .data = (void *)(uintptr_t)given[1]}};
        return CUDA_SUCCESS;
    }
    out->duration_ns = given[0];
    if (function->model == KERNEL_PART)
        out->u.kernel.demand = given[1] != 0 && given[1] < SIM_WHOLE ? (uint32_t)given[1] : SIM_WHOLE;
    return CUDA_SUCCESS;
}

static CUresult launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *params)
{
    sim_stream *stream;
    sim_work work;
    NVS_SIM_TRY(nvs_sim_stream(handle, &stream));
    NVS_SIM_TRY(nvs_sim_kernel_work(params, &work));
    return nvs_sim_submit(stream, &work);
}

SIM_EXPORT CUresult CUDAAPI cuLaunchKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY, unsigned int gridDimZ,
                                           unsigned int blockDimX, unsigned int blockDimY, unsigned int blockDimZ,
                                           unsigned int sharedMemBytes, CUstream hStream, void **kernelParams, void **extra)
{
    const CUDA_KERNEL_NODE_PARAMS params = {.func = f, .gridDimX = gridDimX, .gridDimY = gridDimY, .gridDimZ = gridDimZ,
                                            .blockDimX = blockDimX, .blockDimY = blockDimY, .blockDimZ = blockDimZ,
                                            .sharedMemBytes = sharedMemBytes, .kernelParams = kernelParams, .extra = extra};
    NVS_SIM_ENTER();
    return launch(hStream, &params);
}

#define CLUSTER_MOST 16 /* blocks; 8 unless the function allows a size that is not portable */
#define CLUSTER_PORTABLE 8

/* The blocks of a cluster that a launch asks for; 1 without the attribute.  More than CLUSTER_MOST: as many as none has. */
static CUresult cluster(const CUlaunchConfig *config, CUfunction handle, unsigned *blocks)
{
    sim_function *function;
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    *blocks = 1;
    for (unsigned i = 0; i < config->numAttrs; i++)
        if (config->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
            const CUlaunchAttributeValue *value = &config->attrs[i].value;
            const unsigned x = value->clusterDim.x, y = value->clusterDim.y, z = value->clusterDim.z;
            NVS_SIM_CHECK(x != 0 && y != 0 && z != 0, CUDA_ERROR_INVALID_CLUSTER_SIZE);
            NVS_SIM_CHECK(config->gridDimX % x == 0 && config->gridDimY % y == 0 && config->gridDimZ % z == 0,
                          CUDA_ERROR_INVALID_CLUSTER_SIZE);
            const bool large = x > CLUSTER_MOST || y > CLUSTER_MOST || z > CLUSTER_MOST;
            *blocks = large ? CLUSTER_MOST + 1 : x * y * z;
        }
    const bool any = function->attributes[CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] != 0;
    NVS_SIM_CHECK(any || *blocks <= CLUSTER_PORTABLE, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **kernelParams, void **extra)
{
    unsigned blocks;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(config != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(cluster(config, f, &blocks));
    NVS_SIM_CHECK(blocks <= CLUSTER_MOST, CUDA_ERROR_INVALID_CLUSTER_SIZE);
    const CUDA_KERNEL_NODE_PARAMS params = {
        .func = f, .gridDimX = config->gridDimX, .gridDimY = config->gridDimY, .gridDimZ = config->gridDimZ,
        .blockDimX = config->blockDimX, .blockDimY = config->blockDimY, .blockDimZ = config->blockDimZ,
        .sharedMemBytes = config->sharedMemBytes, .kernelParams = kernelParams, .extra = extra};
    return launch(config->hStream, &params);
}

SIM_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernel(CUfunction f, unsigned int gridDimX, unsigned int gridDimY,
                                                      unsigned int gridDimZ, unsigned int blockDimX, unsigned int blockDimY,
                                                      unsigned int blockDimZ, unsigned int sharedMemBytes, CUstream hStream,
                                                      void **kernelParams)
{
    const CUDA_KERNEL_NODE_PARAMS params = {.func = f, .gridDimX = gridDimX, .gridDimY = gridDimY, .gridDimZ = gridDimZ,
                                            .blockDimX = blockDimX, .blockDimY = blockDimY, .blockDimZ = blockDimZ,
                                            .sharedMemBytes = sharedMemBytes, .kernelParams = kernelParams};
    NVS_SIM_ENTER();
    NVS_SIM_CHECK((uint64_t)gridDimX * gridDimY * gridDimZ <= 16 * 32, CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE);
    return launch(hStream, &params);
}

/* Attributes of functions and kernels. */

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    sim_function *function;
    NVS_SIM_CHECK(value != NULL && (unsigned)attribute < CU_FUNC_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    *value = function->attributes[attribute];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    sim_function *function;
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    if ((unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX || (unsigned)attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES && (value < 0 || value > 232448))
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuFuncGetAttribute, (int *pi, CUfunction_attribute attrib, CUfunction hfunc), get_attribute(pi, attrib, hfunc))
NVS_SIM_ENTRY(cuFuncSetAttribute, (CUfunction hfunc, CUfunction_attribute attrib, int value), set_attribute(hfunc, attrib, value))
NVS_SIM_ENTRY(cuKernelGetAttribute, (int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev),
              get_attribute(pi, attrib, (CUfunction)kernel))
NVS_SIM_ENTRY(cuKernelSetAttribute, (CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev),
              set_attribute((CUfunction)kernel, attrib, val))

/* The remaining settings have no effect. */
static CUresult check(CUfunction handle)
{
    sim_function *function;
    return nvs_sim_function(handle, &function);
}

NVS_SIM_ENTRY(cuFuncSetCacheConfig, (CUfunction function, CUfunc_cache config), check(function))
NVS_SIM_ENTRY(cuKernelSetCacheConfig, (CUkernel kernel, CUfunc_cache config, CUdevice device), check((CUfunction)kernel))
NVS_SIM_ENTRY(cuFuncSetSharedMemConfig, (CUfunction function, CUsharedconfig config), check(function))
NVS_SIM_ENTRY(cuFuncLoad, (CUfunction function), check(function))
NVS_SIM_ENTRY(cuFuncSetBlockShape, (CUfunction function, int x, int y, int z), check(function))
NVS_SIM_ENTRY(cuFuncSetSharedSize, (CUfunction function, unsigned int bytes), check(function))
NVS_SIM_GETTER(cuFuncIsLoaded, (CUfunctionLoadingState *state, CUfunction function), , check(function), state, CU_FUNCTION_LOADING_STATE_LOADED)

/* Occupancy. */

#define THREADS_PER_MULTIPROCESSOR 2048
#define BLOCKS_PER_MULTIPROCESSOR 32
#define SHARED_PER_MULTIPROCESSOR 233472u
#define SHARED_RESERVED 1024u /* for each block */
#define MULTIPROCESSORS 16

static CUresult blocks(int *out, CUfunction handle, int block_size, size_t shared_bytes)
{
    sim_function *function;
    if (out == NULL || block_size <= 0 || block_size > 1024)
        return CUDA_ERROR_INVALID_VALUE;
    NVS_SIM_TRY(nvs_sim_function(handle, &function));
    int count = THREADS_PER_MULTIPROCESSOR / ((block_size + 31) / 32 * 32);
    if (count > BLOCKS_PER_MULTIPROCESSOR)
        count = BLOCKS_PER_MULTIPROCESSOR;
    if (shared_bytes != 0 && SHARED_PER_MULTIPROCESSOR / (shared_bytes + SHARED_RESERVED) < (size_t)count)
        count = (int)(SHARED_PER_MULTIPROCESSOR / (shared_bytes + SHARED_RESERVED));
    *out = count;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize),
              blocks(numBlocks, func, blockSize, dynamicSMemSize))
NVS_SIM_ENTRY(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags,
              (int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize, unsigned int flags),
              blocks(numBlocks, func, blockSize, dynamicSMemSize))

static CUresult potential(int *min_grid, int *block_size, CUfunction function, CUoccupancyB2DSize shared_of, size_t shared_bytes,
                          int limit)
{
    int best = 0, best_threads = -1, count;
    if (min_grid == NULL || block_size == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    for (int size = limit > 0 && limit < 1024 ? limit : 1024; size >= 32; size -= 32) {
        NVS_SIM_TRY(blocks(&count, function, size, shared_of != NULL ? shared_of(size) : shared_bytes));
        if (count * size > best_threads) {
            best_threads = count * size;
            best = size;
            *min_grid = count * MULTIPROCESSORS;
        }
    }
    *block_size = best;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuOccupancyMaxPotentialBlockSize, (int *minGridSize, int *blockSize, CUfunction func,
                                                 CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize, int blockSizeLimit),
              potential(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit))
NVS_SIM_ENTRY(cuOccupancyMaxPotentialBlockSizeWithFlags,
              (int *minGridSize, int *blockSize, CUfunction func, CUoccupancyB2DSize blockSizeToDynamicSMemSize, size_t dynamicSMemSize,
               int blockSizeLimit, unsigned int flags),
              potential(minGridSize, blockSize, func, blockSizeToDynamicSMemSize, dynamicSMemSize, blockSizeLimit))

/* The dynamic shared memory of each of `count` blocks on one multiprocessor. */
static CUresult shared_left(size_t *bytes, CUfunction function, int count, int block_size)
{
    int most;
    NVS_SIM_CHECK(bytes != NULL && count > 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(blocks(&most, function, block_size, 0));
    NVS_SIM_CHECK(count <= most, CUDA_ERROR_INVALID_VALUE);
    *bytes = SHARED_PER_MULTIPROCESSOR / (unsigned)count / 128 * 128 - SHARED_RESERVED;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuOccupancyAvailableDynamicSMemPerBlock, (size_t *dynamicSmemSize, CUfunction func, int numBlocks, int blockSize),
              shared_left(dynamicSmemSize, func, numBlocks, blockSize))

static CUresult clusters(int *out, CUfunction function, const CUlaunchConfig *config)
{
    int each;
    unsigned size;
    NVS_SIM_CHECK(out != NULL && config != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(cluster(config, function, &size));
    NVS_SIM_TRY(blocks(&each, function, (int)(config->blockDimX * config->blockDimY * config->blockDimZ), config->sharedMemBytes));
    *out = size <= CLUSTER_MOST ? each * MULTIPROCESSORS / (int)size : 0; /* no error, on an H200 with driver 580 */
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuOccupancyMaxActiveClusters, (int *numClusters, CUfunction func, const CUlaunchConfig *config),
              clusters(numClusters, func, config))

NVS_SIM_GETTER(cuOccupancyMaxPotentialClusterSize, (int *clusterSize, CUfunction func, const CUlaunchConfig *config),
               sim_function *function, nvs_sim_function(func, &function), clusterSize,
               function->attributes[CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] != 0 ? CLUSTER_MOST : CLUSTER_PORTABLE)
