/* See mapping.h. */
#include "ipc/mapping.h"

#include "base/log.h"
#include "driver/cuda_api.h"
#include "swap/swap.h"

void nvs_ipc_unmap(nvs_ipc_mapping *mapping)
{
    if (mapping->mapped != 0 && nvs_vmm_unmap(mapping->base, mapping->mapped) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not unmap memory of another process; it is kept until this program ends");
    else if (mapping->base != 0)
        NVS_REAL(cuMemAddressFree)(mapping->base, mapping->bytes);
    mapping->base = 0;
    mapping->mapped = 0;
}

/* Closes the descriptors, also on failure. */
static CUresult map_part(nvs_ipc_mapping *mapping, const nvs_ipc_answer *part, const int *descriptors)
{
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < part->here && result == CUDA_SUCCESS; i++) {
        CUmemGenericAllocationHandle handle;
        if (part->bytes[i] > mapping->bytes - mapping->mapped) {
            result = CUDA_ERROR_MAP_FAILED;
            break;
        }
        result = NVS_REAL(cuMemImportFromShareableHandle)(&handle, (void *)(uintptr_t)descriptors[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result != CUDA_SUCCESS)
            break;
        result = NVS_REAL(cuMemMap)(mapping->base + mapping->mapped, part->bytes[i], 0, handle, 0);
        if (result == CUDA_SUCCESS)
            mapping->mapped += part->bytes[i];
        NVS_REAL(cuMemRelease)(handle); /* the mapping keeps the memory */
    }
    nvs_ipc_close_all(descriptors, part->here);
    return result;
}

CUresult nvs_ipc_give_access(CUdeviceptr base, uint64_t bytes, uint32_t gpu)
{
    const CUmemAccessDesc desc = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return NVS_REAL(cuMemSetAccess)(base, bytes, &desc, 1);
}

/* Gives access to the importing GPU, and to the GPU that holds the memory if this process sees it. */
static CUresult give_access(const nvs_ipc_mapping *mapping, uint32_t gpu)
{
    int owner;
    const CUresult result = nvs_ipc_give_access(mapping->base, mapping->bytes, gpu);
    if (result == CUDA_SUCCESS && NVS_REAL(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mapping->base) == CUDA_SUCCESS &&
        owner >= 0 && owner != (int)gpu)
        (void)nvs_ipc_give_access(mapping->base, mapping->bytes, (uint32_t)owner); /* either GPU may carry out a copy */
    return result;
}

CUresult nvs_ipc_map(nvs_ipc_connection *from, const nvs_ipc_secret *key, uint32_t gpu, uint64_t deadline_ns, nvs_ipc_mapping *out)
{
    nvs_ipc_answer part;
    int descriptors[NVS_IPC_CHUNKS];
    uint32_t done = 0, chunks = 1;
    CUresult result = CUDA_SUCCESS;
    *out = (nvs_ipc_mapping){0};
    for (; done < chunks && result == CUDA_SUCCESS; done += part.here) {
        result = nvs_ipc_fetch(from, key, done, &part, descriptors, deadline_ns);
        if (result != CUDA_SUCCESS)
            return result;
        if (done == 0) {
            out->bytes = part.total_bytes;
            chunks = part.chunks;
            result = NVS_REAL(cuMemAddressReserve)(&out->base, out->bytes, 0, 0, 0);
            if (result != CUDA_SUCCESS) {
                out->base = 0;
                nvs_ipc_close_all(descriptors, part.here);
                return result;
            }
            out->address = out->base + part.offset;
            out->length = part.length;
        }
        result = map_part(out, &part, descriptors);
    }
    if (result == CUDA_SUCCESS && out->mapped != out->bytes)
        result = CUDA_ERROR_MAP_FAILED;
    return result == CUDA_SUCCESS ? give_access(out, gpu) : result;
}
