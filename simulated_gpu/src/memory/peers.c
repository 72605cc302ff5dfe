/* Access between GPUs.
 *
 * The rules are those of real drivers, as measured:
 *  - Every GPU reaches host and managed memory.
 *  - Copies reach memory of cuMemAlloc and of IPC even without peer access.  Fills, kernels and memory operations of streams need
 *    peer access of their context.
 *  - Mappings and pools belong to no context.  The GPU of the stream needs access rights (cuMemSetAccess, cuMemPoolSetAccess), also
 *    for copies to and from the host; cuCtxEnablePeerAccess does not give them.  cuMemcpyPeer names a context for each end.
 * A copy without rights fails at submission (CUDA_ERROR_INVALID_VALUE); a kernel fails when it runs.
 * The simulation keeps the peer access of a context by device.
 */
#include "memory/memory.h"

bool nvs_sim_peers_possible(const sim_device *one, const sim_device *other)
{
    return nvs_sim_settings.peers && !one->instance && !other->instance;
}

static bool has_rights(const sim_device *by, uintptr_t address, size_t bytes)
{
    for (uintptr_t at = address; at < address + bytes;) {
        const sim_allocation *one = nvs_sim_find(at);
        if (one == NULL || (one->accessed_by >> by->ordinal & 1) == 0)
            return false;
        at = one->base + one->bytes;
    }
    return true;
}

bool nvs_sim_copy_reaches(const sim_device *by, uintptr_t address, size_t bytes)
{
    const sim_allocation *one = nvs_sim_find(address);
    if (!nvs_sim_accessible(address, bytes))
        return false;
    const bool needs_rights = one != NULL && (one->kind == MEM_MAPPED || one->kind == MEM_POOL || one->kind == MEM_GRAPH);
    return !needs_rights || has_rights(by, address, bytes);
}

static bool has_peer_access(const sim_context *by, const sim_device *owner)
{
    const sim_context *context = by->owner != NULL ? by->owner : by;
    return owner == by->device || (context->peers >> owner->ordinal & 1) != 0;
}

bool nvs_sim_fill_reaches(const sim_context *by, uintptr_t address, size_t bytes)
{
    const sim_allocation *one = nvs_sim_find(address);
    if (!nvs_sim_copy_reaches(by->device, address, bytes))
        return false;
    return one == NULL || one->kind != MEM_DEVICE || has_peer_access(by, one->device);
}

bool nvs_sim_kernel_reaches(const sim_context *by, uintptr_t address, size_t bytes)
{
    const sim_allocation *one = nvs_sim_find(address);
    const sim_context *context = by->owner != NULL ? by->owner : by;
    if (one == NULL || !nvs_sim_copy_reaches(by->device, address, bytes))
        return false;
    if (one->kind == MEM_DEVICE)
        return has_peer_access(by, one->device);
    return one->kind != MEM_IMPORTED || one->device == by->device || one->context == context;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceCanAccessPeer(int *canAccessPeer, CUdevice dev, CUdevice peerDev)
{
    sim_device *peer;
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(canAccessPeer != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(peerDev, &peer));
    *canAccessPeer = device != peer && nvs_sim_peers_possible(device, peer);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attrib, CUdevice srcDevice, CUdevice dstDevice)
{
    sim_device *target;
    NVS_SIM_ENTER_FIND(sim_device *source, nvs_sim_device(srcDevice, &source));
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(dstDevice, &target));
    NVS_SIM_CHECK(source != target, CUDA_ERROR_INVALID_DEVICE);
    *value = attrib == CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED && nvs_sim_peers_possible(source, target);
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxEnablePeerAccess(CUcontext peerContext, unsigned int Flags)
{
    sim_context *peer;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_CHECK(Flags == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_context(peerContext, &peer));
    NVS_SIM_CHECK(peer->device != context->device, CUDA_ERROR_INVALID_DEVICE);
    NVS_SIM_CHECK(nvs_sim_peers_possible(context->device, peer->device), CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
    uint64_t bit = 1ull << peer->device->ordinal;
    NVS_SIM_CHECK((context->peers & bit) == 0, CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED);
    context->peers |= bit;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuCtxDisablePeerAccess(CUcontext peerContext)
{
    sim_context *peer;
    NVS_SIM_ENTER_CONTEXT();
    NVS_SIM_TRY(nvs_sim_context(peerContext, &peer));
    uint64_t bit = 1ull << peer->device->ordinal;
    NVS_SIM_CHECK((context->peers & bit) != 0, CUDA_ERROR_PEER_ACCESS_NOT_ENABLED);
    context->peers &= ~bit;
    return CUDA_SUCCESS;
}
