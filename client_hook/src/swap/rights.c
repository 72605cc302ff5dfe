/* What the driver forgets with the memory, and must be told again when it comes back: who may reach it, attributes of pointers.
 *
 * May not go here: the application's own rights, which are those of its views (view.c).
 */
#include "base/log.h"
#include "driver/cuda_api.h"
#include "swap/swap.h"

CUresult nvs_rights_of_access(uint32_t owner, CUdeviceptr address, uint64_t bytes)
{
    CUmemAccessDesc who[NVS_MAX_GPUS];
    size_t count = 0;
    nvs_swap_lock();
    const uint32_t accessors = nvs_swap_gpus[owner].accessors;
    nvs_swap_unlock();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (gpu == owner || ((accessors >> gpu) & 1))
            who[count++] = (CUmemAccessDesc){.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu},
                                             .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return NVS_REAL(cuMemSetAccess)(address, bytes, who, count);
}

void nvs_rights_of_attributes(const nvs_segment *segment, uint32_t chunk)
{
    unsigned int on = 1;
    nvs_swap_lock();
    bool wanted = segment->sync_memops;
    nvs_swap_unlock();
    if (wanted && NVS_REAL(cuPointerSetAttribute)(&on, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, nvs_segment_chunk_address(segment, chunk)) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS could not be set again on memory that came back");
}
