/* Batches of 3D copies, in order.  Lengths are in elements: of an array that takes part, else of one byte. */
#include "copy/copy.h"

static CUresult element_of(const CUDA_MEMCPY3D_BATCH_OP *op, size_t *out)
{
    const CUmemcpy3DOperand *const ends[] = {&op->src, &op->dst};
    *out = 1;
    for (int i = 0; i < 2; i++) {
        sim_array *array;
        if (ends[i]->type != CU_MEMCPY_OPERAND_TYPE_ARRAY)
            continue;
        NVS_SIM_TRY(nvs_sim_array(ends[i]->op.array.array, &array));
        *out = array->element;
    }
    return CUDA_SUCCESS;
}

#define DESCRIBE_END(side, end)                                                                 \
    do {                                                                                        \
        if ((end)->type == CU_MEMCPY_OPERAND_TYPE_ARRAY) {                                      \
            shape.side##MemoryType = CU_MEMORYTYPE_ARRAY;                                       \
            shape.side##Array = (end)->op.array.array;                                          \
            shape.side##XInBytes = (end)->op.array.offset.x * element;                          \
            shape.side##Y = (end)->op.array.offset.y;                                           \
            shape.side##Z = (end)->op.array.offset.z;                                           \
        } else {                                                                                \
            shape.side##MemoryType = CU_MEMORYTYPE_UNIFIED;                                     \
            shape.side##Device = (end)->op.ptr.ptr;                                             \
            shape.side##Pitch = (end)->op.ptr.rowLength * element;                              \
            shape.side##Height = (end)->op.ptr.layerHeight;                                     \
        }                                                                                       \
    } while (0)

static CUresult batch_op(const CUDA_MEMCPY3D_BATCH_OP *op, CUstream stream)
{
    size_t element;
    CUresult result = element_of(op, &element);
    if (result != CUDA_SUCCESS || op->extent.width == 0 || op->extent.height == 0 || op->extent.depth == 0)
        return result != CUDA_SUCCESS ? result : CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D shape = {.WidthInBytes = op->extent.width * element, .Height = op->extent.height, .Depth = op->extent.depth};
    DESCRIBE_END(src, &op->src);
    DESCRIBE_END(dst, &op->dst);
    return nvs_sim_copy_3d(&shape, stream, true);
}

static CUresult batch_3d(size_t count, const CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags, CUstream handle)
{
    const bool legacy = handle == CU_STREAM_LEGACY || (handle == NULL && !nvs_sim_thread.per_thread);
    CUresult result = list == NULL || count == 0 || flags != 0 || legacy ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = batch_op(&list[i], handle);
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuMemcpy3DBatchAsync(size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, size_t *failIdx,
                                                 unsigned long long flags, CUstream hStream)
{
    NVS_SIM_ENTER();
    if (failIdx != NULL)
        *failIdx = SIZE_MAX;
    return batch_3d(numOps, opList, flags, hStream);
}

NVS_SIM_ENTRY(cuMemcpy3DBatchAsync_v2, (size_t numOps, CUDA_MEMCPY3D_BATCH_OP *opList, unsigned long long flags, CUstream hStream),
              batch_3d(numOps, opList, flags, hStream))
