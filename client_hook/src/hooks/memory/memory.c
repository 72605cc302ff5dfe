/* Wrappers: allocation, free, memory figures, pointer queries, arrays.  Stream-ordered memory is in pool.c, the
 * application's own VMM in vmm.c.
 *
 * These calls submit no work, and pass no gate.  Bad arguments go to the driver, which returns its error.
 */
#include "base/config.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "hooks/memory/swap.h"
#include "ipc/ipc.h"
#include "memory/memory.h"

#include <stdatomic.h>

/* --- allocation --- */

NVS_EXPORT CUresult CUDAAPI cuMemAlloc_v2(CUdeviceptr *dptr, size_t bytesize)
{
    uint32_t gpu = nvs_current_gpu();
    if (dptr == NULL || bytesize == 0 || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemAlloc_v2)(dptr, bytesize);
    return nvs_memory_allocate(gpu, dptr, bytesize);
}

/* Memory of the driver; `bytes` is the expected size. */
static CUresult pitch_in_place(uint32_t gpu, uint64_t bytes, CUdeviceptr *dptr, size_t *pitch, size_t width, size_t height,
                               unsigned int element)
{
    nvs_allocation *entry;
    CUresult result = nvs_pins_admit(NVS_SPACE_ADDRESS, NVS_MEMORY_REAL, gpu, bytes, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->context = nvs_owner_context();
    result = NVS_REAL(cuMemAllocPitch_v2)(dptr, pitch, width, height, element);
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop(entry);
        return result;
    }
    nvs_memory_correct(entry, *pitch * height);
    nvs_memory_keep(entry, *dptr, *pitch * height);
    return result;
}

/* The driver's alignment of rows, found once per GPU: the pitch of a one-byte row.  0: the driver fails. */
static size_t pitch_alignment(uint32_t gpu)
{
    static _Atomic size_t known[NVS_MAX_GPUS];
    /* Relaxed: publishes no other data; every thread finds the same value. */
    size_t pitch = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    CUdeviceptr probe;
    if (pitch != 0)
        return pitch;
    if (pitch_in_place(gpu, 512, &probe, &pitch, 1, 1, 4) != CUDA_SUCCESS)
        return 0;
    nvs_memory_release(probe);
    atomic_store_explicit(&known[gpu], pitch, memory_order_relaxed);
    return pitch;
}

NVS_EXPORT CUresult CUDAAPI cuMemAllocPitch_v2(CUdeviceptr *dptr, size_t *pPitch, size_t WidthInBytes, size_t Height,
                                               unsigned int ElementSizeBytes)
{
    uint32_t gpu = nvs_current_gpu();
    bool sound = dptr != NULL && pPitch != NULL && WidthInBytes != 0 && Height != 0 &&
                 (ElementSizeBytes == 4 || ElementSizeBytes == 8 || ElementSizeBytes == 16);
    if (!sound || WidthInBytes > (SIZE_MAX >> 1) / Height || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemAllocPitch_v2)(dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    size_t align = pitch_alignment(gpu);
    size_t pitch = align != 0 ? (WidthInBytes + align - 1) / align * align : WidthInBytes;
    if (pitch > SIZE_MAX / Height)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (align == 0 || !nvs_memory_backend(gpu)->movable) /* the driver fails, or memory does not move */
        return pitch_in_place(gpu, pitch * Height, dptr, pPitch, WidthInBytes, Height, ElementSizeBytes);
    CUresult result = nvs_memory_allocate(gpu, dptr, pitch * Height);
    if (result == CUDA_SUCCESS)
        *pPitch = pitch;
    return result;
}

/* Managed memory that the application allocates is charged and moved as other memory. */
NVS_EXPORT CUresult CUDAAPI cuMemAllocManaged(CUdeviceptr *dptr, size_t bytesize, unsigned int flags)
{
    uint32_t gpu = nvs_current_gpu();
    nvs_allocation *entry;
    if (dptr == NULL || bytesize == 0 || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    CUresult result = nvs_memory_admit(NVS_SPACE_ADDRESS, NVS_MEMORY_APP_MANAGED, gpu, bytesize, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    entry->context = nvs_owner_context();
    (void)nvs_context_gpu(entry->context); /* registered: movers visit it */
    entry->backend.movable = nvs_memory_backend(gpu)->movable && entry->context != NULL;
    result = NVS_REAL(cuMemAllocManaged)(dptr, bytesize, flags);
    if (result == CUDA_SUCCESS)
        nvs_memory_keep(entry, *dptr, bytesize);
    else
        nvs_memory_drop(entry);
    return result;
}

/* --- free --- */

NVS_EXPORT CUresult CUDAAPI cuMemFree_v2(CUdeviceptr dptr)
{
    return nvs_memory_release(dptr);
}

/* --- the virtual card --- */

NVS_EXPORT CUresult CUDAAPI cuMemGetInfo_v2(size_t *free, size_t *total)
{
    uint32_t gpu = nvs_current_gpu();
    if (free == NULL || total == NULL || !nvs_memory_manages(gpu))
        return NVS_REAL(cuMemGetInfo_v2)(free, total);
    size_t real_free, real_total;
    CUresult result = NVS_REAL(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result != CUDA_SUCCESS)
        return result;
    nvs_memory_reap(gpu, false);
    uint64_t free_bytes = real_free, total_bytes = real_total;
    nvs_memory_virtual_info(gpu, &free_bytes, &total_bytes);
    *free = free_bytes;
    *total = total_bytes;
    return CUDA_SUCCESS;
}

NVS_EXPORT CUresult CUDAAPI cuDeviceTotalMem_v2(size_t *bytes, CUdevice dev)
{
    CUresult result = NVS_REAL(cuDeviceTotalMem_v2)(bytes, dev);
    if (result != CUDA_SUCCESS || bytes == NULL || dev < 0 || !nvs_memory_manages((uint32_t)dev))
        return result;
    uint64_t free_bytes = 0, total_bytes = *bytes;
    nvs_memory_virtual_info((uint32_t)dev, &free_bytes, &total_bytes);
    *bytes = total_bytes;
    return CUDA_SUCCESS;
}

/* --- pointer queries: redirected memory looks like memory of cuMemAlloc --- */

/* True if the driver owns all memory.  Fast: frameworks query every pointer that they pass to a kernel. */
static inline bool as_the_driver_says(void)
{
    return NVS_LIKELY(nvs_config.memory_mode == NVS_MODE_DEVICE) &&
           NVS_LIKELY(atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0); /* see base/hot.h */
}

static bool redirected(CUdeviceptr pointer, nvs_allocation *copy)
{
    return nvs_config.enabled && nvs_config.memory_mode != NVS_MODE_DEVICE && nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, copy) == NVS_FOUND &&
           (copy->kind == NVS_MEMORY_REDIRECTED || copy->backend.chunked);
}

/* Corrects `data`, which the driver has filled, to the attribute of memory of cuMemAlloc. */
static void disguise(void *data, CUpointer_attribute attribute, const nvs_allocation *as)
{
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(CUmemorytype *)data = CU_MEMORYTYPE_DEVICE;
        break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        *(unsigned char *)data = 0; /* it was 1: clearing the low byte works for every width */
        break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER:
        *(void **)data = NULL;
        break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        *(int *)data = (int)as->gpu;
        break;
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        *(CUcontext *)data = as->context;
        break;
    default:
        break;
    }
}

static __attribute__((noinline)) CUresult ask_about(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    nvs_allocation as;
    nvs_ipc_import shared;
    if (data != NULL && nvs_ipc_imported(ptr, &shared) && nvs_ipc_pointer_answer(&shared, data, attribute))
        return CUDA_SUCCESS;
    /* The most frequent query has the same answer for managed memory, and needs no lock. */
    const bool same = nvs_config.memory_mode == NVS_MODE_MANAGED && attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER;
    if (data == NULL || same || !redirected(ptr, &as))
        return nvs_between_chunks(ptr) ? CUDA_ERROR_INVALID_VALUE : NVS_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    if (as.backend.chunked)
        return nvs_pointer_answer(data, attribute, &as, ptr);
    if (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER)
        return CUDA_ERROR_INVALID_VALUE; /* device memory has none */
    CUresult result = NVS_REAL(cuPointerGetAttribute)(data, attribute, ptr);
    if (result == CUDA_SUCCESS)
        disguise(data, attribute, &as);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr ptr)
{
    return as_the_driver_says() ? NVS_REAL(cuPointerGetAttribute)(data, attribute, ptr) : ask_about(data, attribute, ptr);
}

NVS_EXPORT CUresult CUDAAPI cuPointerGetAttributes(unsigned int numAttributes, CUpointer_attribute *attributes, void **data,
                                                   CUdeviceptr ptr)
{
    nvs_allocation as;
    nvs_ipc_import shared;
    if (as_the_driver_says())
        return NVS_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (numAttributes != 0 && attributes != NULL && data != NULL && redirected(ptr, &as) && as.backend.chunked) {
        for (unsigned int i = 0; i < numAttributes; i++)
            nvs_pointer_answer(data[i], attributes[i], &as, ptr); /* ignored: this function clears an attribute that does not apply */
        return CUDA_SUCCESS;
    }
    if (nvs_between_chunks(ptr))
        ptr = 1; /* of no memory: the driver clears the values */
    CUresult result = NVS_REAL(cuPointerGetAttributes)(numAttributes, attributes, data, ptr);
    if (result == CUDA_SUCCESS && nvs_ipc_imported(ptr, &shared))
        for (unsigned int i = 0; i < numAttributes; i++)
            (void)nvs_ipc_pointer_answer(&shared, data[i], attributes[i]);
    if (result != CUDA_SUCCESS || !redirected(ptr, &as))
        return result;
    for (unsigned int i = 0; i < numAttributes; i++)
        disguise(data[i], attributes[i], &as);
    return result;
}

/* --- arrays do not move; they are charged by the size of their texels --- */

/* Bits of one texel, all channels. */
static uint64_t texel_bits(CUarray_format format, unsigned int channels)
{
    switch ((int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return UINT64_C(8) * channels;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return UINT64_C(16) * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return UINT64_C(32) * channels;
    case CU_AD_FORMAT_BC1_UNORM: /* block-compressed: 4 by 4 texels in 8 or 16 bytes */
    case CU_AD_FORMAT_BC1_UNORM_SRGB:
    case CU_AD_FORMAT_BC4_UNORM:
    case CU_AD_FORMAT_BC4_SNORM:
        return 4;
    case CU_AD_FORMAT_BC2_UNORM:
    case CU_AD_FORMAT_BC2_UNORM_SRGB:
    case CU_AD_FORMAT_BC3_UNORM:
    case CU_AD_FORMAT_BC3_UNORM_SRGB:
    case CU_AD_FORMAT_BC5_UNORM:
    case CU_AD_FORMAT_BC5_SNORM:
    case CU_AD_FORMAT_BC6H_UF16:
    case CU_AD_FORMAT_BC6H_SF16:
    case CU_AD_FORMAT_BC7_UNORM:
    case CU_AD_FORMAT_BC7_UNORM_SRGB:
    case CU_AD_FORMAT_UNORM_INT8X1:
    case CU_AD_FORMAT_SNORM_INT8X1:
        return 8;
    case CU_AD_FORMAT_NV12:
        return 12;
    case CU_AD_FORMAT_UNORM_INT8X2:
    case CU_AD_FORMAT_SNORM_INT8X2:
    case CU_AD_FORMAT_UNORM_INT16X1:
    case CU_AD_FORMAT_SNORM_INT16X1:
        return 16;
    case CU_AD_FORMAT_UNORM_INT16X4:
    case CU_AD_FORMAT_SNORM_INT16X4:
        return 64;
    default:
        return 32; /* packed and planar video formats need at most about this */
    }
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels)
{
    uint64_t total = 0, width = of->Width, height = of->Height, depth = of->Depth;
    bool layered = (of->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP)) != 0;
    if (of->Flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING))
        return 0; /* backed by handles, which are charged themselves */
    for (unsigned int level = 0; level < levels && level < 64; level++) {
        uint64_t texels = (width ? width : 1) * (height ? height : 1) * (depth ? depth : 1);
        total += (texels * texel_bits(of->Format, of->NumChannels) + 7) / 8;
        if ((width | height | (layered ? 0 : depth)) <= 1)
            break;
        width >>= 1;
        height >>= 1;
        depth = layered ? depth : depth >> 1;
    }
    return total;
}

static CUresult admit_array(const CUDA_ARRAY3D_DESCRIPTOR *of, unsigned int levels, nvs_allocation **out)
{
    uint32_t gpu = nvs_current_gpu();
    *out = NULL;
    if (!nvs_memory_manages(gpu))
        return CUDA_SUCCESS;
    CUresult result = nvs_pins_admit(NVS_SPACE_ARRAY, NVS_MEMORY_ARRAY, gpu, array_bytes(of, levels), out);
    if (result == CUDA_SUCCESS)
        (*out)->context = nvs_owner_context();
    return result;
}

/* `handle` points to the handle that the driver has filled in. */
static CUresult keep_array(CUresult result, nvs_allocation *entry, const void *handle)
{
    if (entry != NULL && result == CUDA_SUCCESS)
        nvs_memory_keep(entry, (uint64_t) * (const uintptr_t *)handle, 1);
    else if (entry != NULL)
        nvs_memory_drop(entry);
    return result;
}

static CUDA_ARRAY3D_DESCRIPTOR flat(size_t width, size_t height, CUarray_format format, unsigned int channels)
{
    return (CUDA_ARRAY3D_DESCRIPTOR){.Width = width, .Height = height, .Format = format, .NumChannels = channels};
}

#define NVS_ARRAY_CREATE(symbol, descriptor, as_3d)                                                            \
    NVS_EXPORT CUresult CUDAAPI symbol(CUarray *pHandle, const descriptor *pAllocateArray)                     \
    {                                                                                                          \
        nvs_allocation *entry;                                                                                 \
        if (pHandle == NULL || pAllocateArray == NULL)                                                         \
            return NVS_REAL(symbol)(pHandle, pAllocateArray);                                                  \
        CUDA_ARRAY3D_DESCRIPTOR wanted = as_3d;                                                                \
        CUresult result = admit_array(&wanted, 1, &entry);                                                     \
        if (result != CUDA_SUCCESS)                                                                            \
            return result;                                                                                     \
        result = NVS_REAL(symbol)(pHandle, pAllocateArray);                                                    \
        return keep_array(result, entry, pHandle);                                                             \
    }

NVS_ARRAY_CREATE(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR,
                 flat(pAllocateArray->Width, pAllocateArray->Height, pAllocateArray->Format, pAllocateArray->NumChannels))
NVS_ARRAY_CREATE(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, *pAllocateArray)

NVS_EXPORT CUresult CUDAAPI cuMipmappedArrayCreate(CUmipmappedArray *pHandle, const CUDA_ARRAY3D_DESCRIPTOR *pMipmappedArrayDesc,
                                                   unsigned int numMipmapLevels)
{
    nvs_allocation *entry;
    if (pHandle == NULL || pMipmappedArrayDesc == NULL)
        return NVS_REAL(cuMipmappedArrayCreate)(pHandle, pMipmappedArrayDesc, numMipmapLevels);
    CUresult result = admit_array(pMipmappedArrayDesc, numMipmapLevels, &entry);
    if (result != CUDA_SUCCESS)
        return result;
    result = NVS_REAL(cuMipmappedArrayCreate)(pHandle, pMipmappedArrayDesc, numMipmapLevels);
    return keep_array(result, entry, pHandle);
}

/* Removes the entry before the driver may reuse the handle; end_array puts it back if the driver fails. */
static nvs_allocation *take_array(const void *handle)
{
    nvs_allocation *entry = NULL;
    nvs_allocation_take(NVS_SPACE_ARRAY, (uint64_t)(uintptr_t)handle, &entry);
    return entry;
}

static CUresult end_array(CUresult result, nvs_allocation *entry)
{
    if (entry != NULL && result == CUDA_SUCCESS)
        nvs_memory_drop(entry);
    else if (entry != NULL)
        nvs_memory_drop_all(nvs_allocation_insert(entry));
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuArrayDestroy(CUarray hArray)
{
    nvs_allocation *entry = take_array(hArray);
    return end_array(NVS_REAL(cuArrayDestroy)(hArray), entry);
}

NVS_EXPORT CUresult CUDAAPI cuMipmappedArrayDestroy(CUmipmappedArray hMipmappedArray)
{
    nvs_allocation *entry = take_array(hMipmappedArray);
    return end_array(NVS_REAL(cuMipmappedArrayDestroy)(hMipmappedArray), entry);
}
