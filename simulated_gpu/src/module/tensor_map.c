/* Descriptors of tensors: 128 bytes in host memory, which no kernel reads here.  The rules are those of the header. */
#include "base/entry.h"

#include <string.h>

typedef struct tensor_map { /* in a CUtensorMap, whose content only a GPU knows */
    uint64_t address;
    uint32_t rank, interleave;
} tensor_map;

static bool aligned(uint64_t value, uint64_t alignment) { return value % alignment == 0; }

static bool element_fits(CUtensorMapDataType type, uint32_t width)
{
    static const uint8_t bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4}; /* of the types that are not packed */
    return (size_t)type >= sizeof bytes || aligned((uint64_t)width * bytes[type], 16);
}

static CUresult encode(CUtensorMap *out, CUtensorMapDataType type, uint32_t rank, const void *address, const cuuint64_t *sizes,
                       const cuuint64_t *strides, const cuuint32_t *steps, CUtensorMapInterleave interleave)
{
    const uint64_t alignment = interleave == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16;
    bool good = out != NULL && aligned((uintptr_t)out, 64) && (unsigned)type <= CU_TENSOR_MAP_DATA_TYPE_16U6_ALIGN16B &&
                rank >= (interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ? 3 : 1) && rank <= 5 && address != NULL &&
                aligned((uintptr_t)address, alignment) && sizes != NULL && (strides != NULL || rank == 1) && steps != NULL;
    for (uint32_t i = 0; good && i < rank; i++)
        good = sizes[i] != 0 && sizes[i] <= UINT64_C(1) << 32 && steps[i] != 0 && steps[i] <= 8;
    for (uint32_t i = 0; good && i + 1 < rank; i++)
        good = strides[i] < UINT64_C(1) << 40 && aligned(strides[i], alignment);
    NVS_SIM_CHECK(good, CUDA_ERROR_INVALID_VALUE);
    const tensor_map map = {.address = (uintptr_t)address, .rank = rank, .interleave = interleave};
    memset(out, 0, sizeof *out);
    memcpy(out, &map, sizeof map);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuTensorMapEncodeTiled(CUtensorMap *tensorMap, CUtensorMapDataType tensorDataType, cuuint32_t tensorRank,
                                                   void *globalAddress, const cuuint64_t *globalDim, const cuuint64_t *globalStrides,
                                                   const cuuint32_t *boxDim, const cuuint32_t *elementStrides,
                                                   CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                                   CUtensorMapL2promotion l2Promotion, CUtensorMapFloatOOBfill oobFill)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(boxDim != NULL && tensorRank <= 5, CUDA_ERROR_INVALID_VALUE);
    for (uint32_t i = 0; i < tensorRank; i++)
        NVS_SIM_CHECK(boxDim[i] != 0 && boxDim[i] <= 256, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(interleave != CU_TENSOR_MAP_INTERLEAVE_NONE || element_fits(tensorDataType, boxDim[0]), CUDA_ERROR_INVALID_VALUE);
    return encode(tensorMap, tensorDataType, tensorRank, globalAddress, globalDim, globalStrides, elementStrides, interleave);
}

#define IM2COL(name, corner, ...)                                                               \
    NVS_SIM_ENTRY(name,                                                                         \
                  (CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,  \
                   const cuuint64_t *sizes, const cuuint64_t *strides, corner lower, corner upper, cuuint32_t channels, cuuint32_t pixels, \
                   const cuuint32_t *steps, CUtensorMapInterleave interleave, __VA_ARGS__),     \
                  rank < 3 || channels == 0 || channels > 256 || pixels > 1024                  \
                      ? CUDA_ERROR_INVALID_VALUE                                                \
                      : encode(map, type, rank, address, sizes, strides, steps, interleave))

IM2COL(cuTensorMapEncodeIm2col, const int *, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2, CUtensorMapFloatOOBfill fill)
IM2COL(cuTensorMapEncodeIm2colWide, int, CUtensorMapIm2ColWideMode mode, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion l2,
       CUtensorMapFloatOOBfill fill)

SIM_EXPORT CUresult CUDAAPI cuTensorMapReplaceAddress(CUtensorMap *tensorMap, void *globalAddress)
{
    tensor_map map;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(tensorMap != NULL && aligned((uintptr_t)tensorMap, 64), CUDA_ERROR_INVALID_VALUE);
    memcpy(&map, tensorMap, sizeof map);
    NVS_SIM_CHECK(map.rank != 0 && aligned((uintptr_t)globalAddress, map.interleave == CU_TENSOR_MAP_INTERLEAVE_32B ? 32 : 16),
                  CUDA_ERROR_INVALID_VALUE);
    map.address = (uintptr_t)globalAddress;
    memcpy(tensorMap, &map, sizeof map);
    return CUDA_SUCCESS;
}
