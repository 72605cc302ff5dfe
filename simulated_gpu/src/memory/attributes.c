/* Attributes of pointers. */
#include "memory/memory.h"

#include <string.h>

static bool device_side(const sim_allocation *one)
{
    return one->kind != MEM_HOST && one->kind != MEM_REGISTERED;
}

static bool has_no_context(const sim_allocation *one)
{
    return one->kind == MEM_MAPPED || one->kind == MEM_POOL || one->kind == MEM_GRAPH;
}

/* The size of an attribute's value. */
static size_t value_size(CUpointer_attribute attribute)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        return 8;
    default:
        return 4;
    }
}

static CUresult get(void *out, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    const sim_allocation *one = nvs_sim_find((uintptr_t)pointer);
    uint64_t value = 0;
    if (one == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: value = has_no_context(one) ? 0 : (uintptr_t)one->context; break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: value = device_side(one) ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: value = pointer; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        if (device_side(one) && one->kind != MEM_MANAGED)
            return CUDA_ERROR_INVALID_VALUE;
        value = pointer;
        break;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: value = one->id; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: value = one->kind == MEM_MANAGED; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: value = (uint64_t)one->device->ordinal; break;
    case CU_POINTER_ATTRIBUTE_MAPPED: value = 1; break;
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: value = one->base; break;
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE: value = one->bytes; break;
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS: value = CU_POINTER_ATTRIBUTE_ACCESS_FLAG_READWRITE; break;
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE: value = one->kind == MEM_POOL ? (uintptr_t)one->account.handle : 0; break;
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS: value = one->sync_memops; break;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: value = one->kind == MEM_DEVICE && one->mapped_bytes != 0; break;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES: value = one->kind == MEM_MAPPED ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : 0; break;
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    memcpy(out, &value, value_size(attribute)); /* the host is little-endian */
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(data != NULL, CUDA_ERROR_INVALID_VALUE);
    return get(data, attribute, ptr);
}

/* As documented, unknown pointers give zeros. */
SIM_EXPORT CUresult CUDAAPI cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
                                                   CUdeviceptr ptr)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(attributes != NULL && data != NULL, CUDA_ERROR_INVALID_VALUE);
    for (unsigned i = 0; i < numAttributes; i++)
        if (get(data[i], attributes[i], ptr) != CUDA_SUCCESS) {
            memset(data[i], 0, value_size(attributes[i]));
            if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
                memset(data[i], 0xff, 4); /* CU_DEVICE_INVALID */
        }
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    NVS_SIM_ENTER();
    sim_allocation *one = nvs_sim_find((uintptr_t)ptr);
    NVS_SIM_CHECK(value != NULL && one != NULL && attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, CUDA_ERROR_INVALID_VALUE);
    int on;
    memcpy(&on, value, sizeof on);
    one->sync_memops = on != 0;
    return CUDA_SUCCESS;
}
