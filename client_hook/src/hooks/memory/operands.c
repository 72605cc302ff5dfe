/* See operands.h. */
#include "hooks/memory/operands.h"

#include "base/log.h"
#include "driver/cuda_api.h"
#include "hooks/memory/swap.h"
#include "memory/memory.h"
#include "swap/swap.h"

static bool can_reach(uint32_t accessor, uint32_t owner)
{
    int can = 0;
    return NVS_REAL(cuDeviceCanAccessPeer)(&can, (CUdevice)accessor, (CUdevice)owner) == CUDA_SUCCESS && can != 0;
}

/* The GPU whose chunk is at an address (NVS_NO_GPU: none).  Memory of another GPU stays on its card from now on. */
static uint32_t find(uint32_t gpu, CUdeviceptr address, unsigned *found)
{
    nvs_allocation as;
    if (address == 0)
        return NVS_NO_GPU;
    if (nvs_in_chunks(address, &as)) {
        if (as.gpu != gpu)
            nvs_swap_pin_gpu(as.gpu);
        else
            *found |= NVS_OPERANDS_MOVE;
        return as.gpu;
    }
    if (!nvs_ipc_allow(address, gpu))
        *found |= NVS_OPERANDS_UNREACHABLE;
    return NVS_NO_GPU;
}

static bool give(uint32_t owner, uint32_t accessor)
{
    if (owner == accessor || nvs_swap_is_allowed(owner, accessor))
        return true;
    if (!can_reach(accessor, owner))
        return false;
    nvs_swap_allow(owner, accessor);
    return true;
}

unsigned nvs_operands_prepare(uint32_t gpu, CUdeviceptr one, CUdeviceptr other)
{
    unsigned found = 0;
    const uint32_t owners[2] = {find(gpu, one, &found), find(gpu, other, &found)};
    /* For a copy of chunks between GPUs both need access rights: either may execute it. */
    for (size_t i = 0; i < 2; i++)
        if (owners[i] != NVS_NO_GPU && (!give(owners[i], gpu) || (owners[1 - i] != NVS_NO_GPU && !give(owners[i], owners[1 - i]))))
            found |= NVS_OPERANDS_UNREACHABLE;
    return found;
}

unsigned nvs_operands_prepare_list(uint32_t gpu, const CUdeviceptr *targets, const CUdeviceptr *sources, size_t count)
{
    unsigned found = 0;
    for (size_t i = 0; targets != NULL && sources != NULL && i < count; i++)
        found |= nvs_operands_prepare(gpu, targets[i], sources[i]);
    return found;
}

static unsigned prepare_shape(uint32_t gpu, CUmemorytype to, CUdeviceptr target, CUmemorytype from, CUdeviceptr source)
{
    const bool there = to == CU_MEMORYTYPE_DEVICE || to == CU_MEMORYTYPE_UNIFIED;
    const bool here = from == CU_MEMORYTYPE_DEVICE || from == CU_MEMORYTYPE_UNIFIED;
    return nvs_operands_prepare(gpu, there ? target : 0, here ? source : 0);
}

unsigned nvs_operands_prepare_2d(uint32_t gpu, const CUDA_MEMCPY2D *at)
{
    return at != NULL ? prepare_shape(gpu, at->dstMemoryType, at->dstDevice, at->srcMemoryType, at->srcDevice) : 0;
}

unsigned nvs_operands_prepare_3d(uint32_t gpu, const CUDA_MEMCPY3D *at)
{
    return at != NULL ? prepare_shape(gpu, at->dstMemoryType, at->dstDevice, at->srcMemoryType, at->srcDevice) : 0;
}

/* The call names a context for each end, and needs only their rights. */
unsigned nvs_operands_prepare_peer(uint32_t gpu, const CUDA_MEMCPY3D_PEER *at)
{
    return at != NULL ? prepare_shape(gpu, at->dstMemoryType, at->dstDevice, at->srcMemoryType, at->srcDevice) & ~NVS_OPERANDS_UNREACHABLE : 0;
}

unsigned nvs_operands_prepare_shapes(uint32_t gpu, const CUDA_MEMCPY3D_BATCH_OP *list, size_t count)
{
    unsigned found = 0;
    for (size_t i = 0; list != NULL && i < count; i++) {
        const CUmemcpy3DOperand *to = &list[i].dst, *from = &list[i].src;
        found |= nvs_operands_prepare(gpu, to->type == CU_MEMCPY_OPERAND_TYPE_POINTER ? to->op.ptr.ptr : 0,
                          from->type == CU_MEMCPY_OPERAND_TYPE_POINTER ? from->op.ptr.ptr : 0);
    }
    return found;
}

unsigned nvs_operands_prepare_values(uint32_t gpu, const CUstreamBatchMemOpParams *list, size_t count)
{
    unsigned found = 0;
    for (size_t i = 0; list != NULL && i < count; i++)
        switch ((int)list[i].operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        case CU_STREAM_MEM_OP_WAIT_VALUE_64: found |= nvs_operands_prepare(gpu, list[i].waitValue.address, 0); break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        case CU_STREAM_MEM_OP_WRITE_VALUE_64: found |= nvs_operands_prepare(gpu, list[i].writeValue.address, 0); break;
#if CUDA_VERSION >= 13050
        case CU_STREAM_MEM_OP_ATOMIC_REDUCTION: found |= nvs_operands_prepare(gpu, list[i].atomicReduction.address, 0); break;
#endif
        default: break; /* it names no memory, or is newer than this list */
        }
    return found;
}
