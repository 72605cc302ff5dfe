/* Other GPUs of this program that work on what one of them has opened (import.c).
 *
 * What a driver shares by a handle of its own, it copies for any GPU, and kernels reach it with peer access.  Ours is mapped for the GPU that
 * opened it: others get rights when a call names it for them, or when they are given peer access.
 */
#include "base/hot.h"
#include "driver/cuda_api.h"
#include "ipc/ipc.h"

#include <stdatomic.h>

/* Of each GPU, those with peer access, by bit.  Relaxed: what is opened while access is given was not in order with it. */
static _Atomic uint32_t accessors[NVS_MAX_GPUS];

bool nvs_ipc_has_access(uint32_t owner, uint32_t accessor)
{
    return accessor != owner && (atomic_load_explicit(&accessors[owner], memory_order_relaxed) >> accessor & 1) != 0; /* see its declaration */
}

bool nvs_ipc_give(CUdeviceptr base, uint64_t bytes, uint32_t gpu)
{
    const CUmemAccessDesc desc = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return NVS_REAL(cuMemSetAccess)(base, bytes, &desc, 1) == CUDA_SUCCESS;
}

bool nvs_ipc_reach(CUdeviceptr pointer, uint32_t gpu)
{
    CUdeviceptr base;
    uint64_t bytes;
    if (NVS_LIKELY(atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0) || gpu >= NVS_MAX_GPUS || /* see base/hot.h */
        !nvs_ipc_find_closed(pointer, NVS_NO_GPU, gpu, &base, &bytes))
        return true;
    const bool given = nvs_ipc_give(base, bytes, gpu);
    if (given)
        nvs_ipc_note_open(base, gpu);
    return given;
}

void nvs_ipc_open_to(uint32_t owner, uint32_t accessor)
{
    CUdeviceptr base;
    uint64_t bytes;
    atomic_fetch_or_explicit(&accessors[owner], UINT32_C(1) << accessor, memory_order_relaxed); /* see its declaration */
    while (nvs_ipc_find_closed(0, owner, accessor, &base, &bytes) && nvs_ipc_give(base, bytes, accessor))
        nvs_ipc_note_open(base, accessor);
}
