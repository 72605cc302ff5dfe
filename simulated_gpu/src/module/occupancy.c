/* Occupancy, by threads alone: the registers and the shared memory of an image are not known. */
#include "module/module.h"

#define THREADS_PER_MULTIPROCESSOR 2048
#define BLOCKS_PER_MULTIPROCESSOR 32
#define SHARED_PER_MULTIPROCESSOR 233472u
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
    if (shared_bytes != 0 && SHARED_PER_MULTIPROCESSOR / (shared_bytes + 1024) < (size_t)count)
        count = (int)(SHARED_PER_MULTIPROCESSOR / (shared_bytes + 1024));
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
