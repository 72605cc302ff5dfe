/* See operands.h.
 *
 * Linear copies between GPUs that cannot reach each other's memory, in mode `swap`, are made by cuMemcpyPeerAsync.  It needs only the rights of each end's
 * own GPU: the driver copies through the host, as it does for memory of cuMemAlloc.
 *
 * Non-goals: 2D, 3D and batch copies (docs/decisions/what-swap-does-without.md).
 */
#include "hooks/operands.h"

#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "hooks/hooks.h"
#include "memory/memory.h"
#include "memory/registry.h"
#include "swap/swap.h"

static bool can_reach(uint32_t accessor, uint32_t owner)
{
    int can = 0;
    return NVS_REAL(cuDeviceCanAccessPeer)(&can, (CUdevice)accessor, (CUdevice)owner) == CUDA_SUCCESS && can != 0;
}

/* The GPU whose chunk is at an address (NVS_NO_GPU: none).  Memory of another GPU links the two. */
static uint32_t find(uint32_t gpu, nvs_operand at, unsigned *found)
{
    nvs_allocation as;
    if (at.address == 0)
        return NVS_NO_GPU;
    if (nvs_in_chunks(at.address, &as)) {
        if (as.kind != NVS_MEMORY_MAPPING && at.bytes > as.length - (at.address - as.key))
            *found |= NVS_OPERANDS_BEYOND;
        if (as.gpu != gpu && gpu < NVS_MAX_GPUS)
            nvs_coordinator.link(1u << gpu | 1u << as.gpu);
        *found |= NVS_OPERANDS_MOVE;
        return as.gpu;
    }
    if (at.bytes != 0 && nvs_between_chunks(at.address))
        *found |= NVS_OPERANDS_BEYOND;
    if (!nvs_ipc_allow(at.address, gpu))
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

unsigned nvs_operands_prepare(uint32_t gpu, nvs_operand one, nvs_operand other)
{
    unsigned found = 0;
    const uint32_t owners[2] = {find(gpu, one, &found), find(gpu, other, &found)};
    /* For a copy of chunks between GPUs both need access rights: either may execute it. */
    for (size_t i = 0; i < 2; i++)
        if (owners[i] != NVS_NO_GPU && (!give(owners[i], gpu) || (owners[1 - i] != NVS_NO_GPU && !give(owners[i], owners[1 - i]))))
            found |= NVS_OPERANDS_UNREACHABLE;
    return found;
}

unsigned nvs_operands_prepare_list(uint32_t gpu, const CUdeviceptr *targets, const CUdeviceptr *sources, const size_t *sizes, size_t count)
{
    unsigned found = 0;
    for (size_t i = 0; targets != NULL && sources != NULL && sizes != NULL && i < count; i++)
        found |= nvs_operands_prepare(gpu, (nvs_operand){targets[i], sizes[i]}, (nvs_operand){sources[i], sizes[i]});
    return found;
}

/* The bytes of a box of rows, which begins at (x, y, z). */
static nvs_operand box(CUdeviceptr base, size_t x, size_t y, size_t z, size_t pitch, size_t rows, size_t width, size_t height, size_t depth)
{
    if (base == 0)
        return (nvs_operand){0};
    return (nvs_operand){base + (z * rows + y) * pitch + x,
                         width != 0 && height != 0 && depth != 0 ? ((depth - 1) * rows + height - 1) * pitch + width : 0};
}

#define NVS_NAMED(at, end) ((at)->end##MemoryType == CU_MEMORYTYPE_DEVICE || (at)->end##MemoryType == CU_MEMORYTYPE_UNIFIED ? (at)->end##Device : 0)
#define NVS_BOX_2D(at, end) \
    box(NVS_NAMED(at, end), (at)->end##XInBytes, (at)->end##Y, 0, (at)->end##Pitch, 0, (at)->WidthInBytes, (at)->Height, 1)
#define NVS_BOX_3D(at, end)                                                                                                              \
    box(NVS_NAMED(at, end), (at)->end##XInBytes, (at)->end##Y, (at)->end##Z, (at)->end##Pitch, (at)->end##Height, (at)->WidthInBytes, \
        (at)->Height, (at)->Depth)

unsigned nvs_operands_prepare_2d(uint32_t gpu, const CUDA_MEMCPY2D *at)
{
    return at != NULL ? nvs_operands_prepare(gpu, NVS_BOX_2D(at, dst), NVS_BOX_2D(at, src)) : 0;
}

unsigned nvs_operands_prepare_3d(uint32_t gpu, const CUDA_MEMCPY3D *at)
{
    return at != NULL ? nvs_operands_prepare(gpu, NVS_BOX_3D(at, dst), NVS_BOX_3D(at, src)) : 0;
}

/* The call names a context for each end, and needs only their rights. */
unsigned nvs_operands_prepare_peer(uint32_t gpu, const CUDA_MEMCPY3D_PEER *at)
{
    return at != NULL ? nvs_operands_prepare(gpu, NVS_BOX_3D(at, dst), NVS_BOX_3D(at, src)) & ~NVS_OPERANDS_UNREACHABLE : 0;
}

/* A length of 0 means: no gaps. */
static nvs_operand of_shape(const CUmemcpy3DOperand *at, const CUextent3D *size)
{
    const size_t pitch = at->op.ptr.rowLength != 0 ? at->op.ptr.rowLength : size->width, rows = at->op.ptr.layerHeight != 0 ? at->op.ptr.layerHeight : size->height;
    return box(at->type == CU_MEMCPY_OPERAND_TYPE_POINTER ? at->op.ptr.ptr : 0, 0, 0, 0, pitch, rows, size->width, size->height, size->depth);
}

unsigned nvs_operands_prepare_shapes(uint32_t gpu, const CUDA_MEMCPY3D_BATCH_OP *list, size_t count)
{
    unsigned found = 0;
    for (size_t i = 0; list != NULL && i < count; i++)
        found |= nvs_operands_prepare(gpu, of_shape(&list[i].dst, &list[i].extent), of_shape(&list[i].src, &list[i].extent));
    return found;
}

unsigned nvs_operands_prepare_values(uint32_t gpu, const CUstreamBatchMemOpParams *list, size_t count)
{
    unsigned found = 0;
    for (size_t i = 0; list != NULL && i < count; i++) {
        nvs_operand at = {0, sizeof(cuuint32_t)};
        switch ((int)list[i].operation) {
        case CU_STREAM_MEM_OP_WAIT_VALUE_32:
        case CU_STREAM_MEM_OP_WAIT_VALUE_64: at.address = list[i].waitValue.address; break;
        case CU_STREAM_MEM_OP_WRITE_VALUE_32:
        case CU_STREAM_MEM_OP_WRITE_VALUE_64: at.address = list[i].writeValue.address; break;
#if CUDA_VERSION >= 13050
        case CU_STREAM_MEM_OP_ATOMIC_REDUCTION: at.address = list[i].atomicReduction.address; break;
#endif
        default: break; /* it names no memory, or is newer than this list */
        }
        found |= nvs_operands_prepare(gpu, at, (nvs_operand){0});
    }
    return found;
}

/* --- copies between GPUs --- */

/* A context of the GPU that holds an address; NULL: host memory, or unknown. */
static CUcontext context_of(CUdeviceptr pointer)
{
    CUcontext found = NULL;
    CUmemorytype type = CU_MEMORYTYPE_DEVICE;
    nvs_allocation allocation;
    nvs_ipc_import imported;
    if (nvs_ipc_imported(pointer, &imported))
        return imported.context;
    if (nvs_allocation_find(NVS_SPACE_ADDRESS, pointer, &allocation) != NVS_ABSENT && allocation.backend.chunked)
        found = nvs_any_context(allocation.gpu);
    else if (NVS_REAL(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE ||
             NVS_REAL(cuPointerGetAttribute)(&found, CU_POINTER_ATTRIBUTE_CONTEXT, pointer) != CUDA_SUCCESS)
        return NULL;
    return found;
}

/* The context of the only device memory that a call names; NULL: the call names none, or two. */
static CUcontext only_context(const nvs_peer_copy *what)
{
    const CUcontext to = what->to != 0 ? context_of(what->to) : NULL, from = what->from != 0 ? context_of(what->from) : NULL;
    if (to != NULL && from != NULL)
        return NULL;
    return to != NULL ? to : from;
}

nvs_peer_copy_outcome nvs_peer_copy_try(const nvs_peer_copy *what, CUresult *result)
{
    if (what->to != 0 && what->from != 0) {
        const CUcontext to = context_of(what->to), from = context_of(what->from);
        if (to != NULL && from != NULL) {
            *result = NVS_REAL(cuMemcpyPeerAsync)(what->to, to, what->from, from, what->bytes, what->stream);
            return NVS_COPY_HANDLED;
        }
    }
    if (what->waits && nvs_context_enter(only_context(what)))
        return NVS_COPY_CONTEXT_PUSHED;
    NVS_LOG_ONCE(NVS_LOG_WARNING, "a GPU cannot access the memory of another one (cuDeviceCanAccessPeer), and the driver rejects this call for "
                                  "memory that moves: run this program with --memory device (NVSHARE_MEMORY=device)");
    return NVS_COPY_DRIVER_ANSWERS;
}

void nvs_peer_copy_pop(void)
{
    CUcontext popped;
    NVS_REAL(cuCtxPopCurrent_v2)(&popped);
}
