/* cuMemAlloc and cuMemFree, page-locked host memory, and attributes of pointers. */
#include "memory/memory.h"

#include <string.h>

SIM_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    NVS_SIM_ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_allocate(context, bytesize, MEM_DEVICE, dptr);
}

SIM_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                               unsigned int ElementSizeBytes)
{
    NVS_SIM_ENTER_ALLOCATING();
    NVS_SIM_CHECK(dptr != NULL && pPitch != NULL && WidthInBytes != 0 && Height != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16, CUDA_ERROR_INVALID_VALUE);
    size_t pitch = (WidthInBytes + 511) / 512 * 512;
    NVS_SIM_CHECK(Height <= ((size_t)1 << 46) / pitch, CUDA_ERROR_OUT_OF_MEMORY);
    NVS_SIM_TRY(nvs_sim_allocate(context, pitch * Height, MEM_DEVICE, dptr));
    *pPitch = pitch;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    if (dptr == 0)
        return CUDA_SUCCESS;
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    sim_allocation *allocation = nvs_sim_find_base(dptr);
    NVS_SIM_CHECK(allocation != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind == MEM_DEVICE || allocation->kind == MEM_MANAGED || allocation->kind == MEM_POOL ||
                      allocation->kind == MEM_GRAPH,
                  CUDA_ERROR_INVALID_VALUE);
    sim_device *device = allocation->device;
    if (allocation->kind == MEM_GRAPH) {
        const bool allocated = nvs_sim_graph_memory_free(allocation->account.handle);
        nvs_sim_device_wait(device);
        return allocated ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    }
    NVS_SIM_CHECK(!allocation->account.freed, CUDA_ERROR_INVALID_VALUE);
    allocation->account.freed = true; /* in driver 580 the pool goes on counting it */
    nvs_sim_device_wait(device); /* as in the driver, work that uses it ends first */
    return nvs_sim_release((uintptr_t)dptr);
}

SIM_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    NVS_SIM_CHECK(free != NULL && total != NULL, CUDA_ERROR_INVALID_VALUE);
    *free = nvs_sim_free(context->device->gpu);
    *total = context->device->capacity_bytes;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuMemGetAddressRange_v2(CUdeviceptr *pbase, size_t *psize, CUdeviceptr dptr)
{
    NVS_SIM_ENTER();
    sim_allocation *allocation = nvs_sim_find((uintptr_t)dptr);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind != MEM_REGISTERED, CUDA_ERROR_NOT_FOUND);
    if (pbase != NULL)
        *pbase = allocation->base;
    if (psize != NULL)
        *psize = allocation->bytes;
    return CUDA_SUCCESS;
}

/* Page-locked host memory: allocated or registered. */

static CUresult host_allocate(void **out, size_t bytes, unsigned flags)
{
    const unsigned known = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED;
    sim_context *context;
    CUdeviceptr pointer;
    NVS_SIM_TRY(nvs_sim_need_current(&context));
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_TRY(context->error);
    NVS_SIM_CHECK(out != NULL && (flags & ~known) == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_allocate(context, bytes, MEM_HOST, &pointer));
    *out = (void *)(uintptr_t)pointer;
    return CUDA_SUCCESS;
}

NVS_SIM_ENTRY(cuMemAllocHost_v2, (void **pp, size_t bytesize), host_allocate(pp, bytesize, 0))
NVS_SIM_ENTRY(cuMemHostAlloc, (void **pp, size_t bytesize, unsigned int Flags), host_allocate(pp, bytesize, Flags))

SIM_EXPORT CUresult CUDAAPI cuMemFreeHost(void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    sim_allocation *allocation = nvs_sim_find_base((CUdeviceptr)(uintptr_t)p);
    if (p == NULL)
        return CUDA_SUCCESS;
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_HOST, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_device_wait(allocation->device);
    return nvs_sim_release((uintptr_t)p);
}

SIM_EXPORT CUresult CUDAAPI cuMemHostRegister_v2(void *p, size_t bytesize, unsigned int Flags)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    NVS_SIM_TRY(nvs_sim_capture_unsafe());
    NVS_SIM_CHECK(p != NULL && bytesize != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(!nvs_sim_overlaps((uintptr_t)p, bytesize), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    sim_allocation allocation = {.base = (uintptr_t)p, .bytes = bytesize, .kind = MEM_REGISTERED, .device = context->device,
                                 .context = context};
    if (nvs_sim_shared_state->gpus[context->device->gpu].integrated)
        allocation.charged_bytes = bytesize;
    NVS_SIM_CHECK(nvs_sim_charge(context->device->gpu, allocation.charged_bytes), CUDA_ERROR_OUT_OF_MEMORY);
    const CUresult result = nvs_sim_insert(&allocation);
    if (result != CUDA_SUCCESS)
        nvs_sim_uncharge(context->device->gpu, allocation.charged_bytes);
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuMemHostUnregister(void *p)
{
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(context->error);
    sim_allocation *allocation = nvs_sim_find_base((CUdeviceptr)(uintptr_t)p);
    NVS_SIM_CHECK(allocation != NULL && allocation->kind == MEM_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    nvs_sim_device_wait(allocation->device);
    return nvs_sim_release((uintptr_t)p);
}

SIM_EXPORT CUresult CUDAAPI cuMemHostGetDevicePointer_v2(CUdeviceptr *pdptr, void *p, unsigned int Flags)
{
    NVS_SIM_ENTER_CONTEXT();
    sim_allocation *allocation = nvs_sim_find((uintptr_t)p);
    NVS_SIM_CHECK(pdptr != NULL && Flags == 0 && allocation != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(allocation->kind == MEM_HOST || allocation->kind == MEM_REGISTERED, CUDA_ERROR_INVALID_VALUE);
    *pdptr = (CUdeviceptr)(uintptr_t)p;
    return CUDA_SUCCESS;
}

/* Attributes of pointers. */

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
