/* Chunks that other processes map too.  They stay on the GPU until the last share ends.
 *
 * Non-goals: the processes, and how descriptors reach them (ipc/export.c).
 */
#include "swap/swap.h"

#include "driver/cuda_api.h"
#include "memory/quota/pins.h"

#include <stdatomic.h>

/* Locked.  The chunks that hold a range of addresses. */
static void find_chunks(const nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out)
{
    *out = (nvs_share){.first = UINT32_MAX};
    for (uint32_t i = 0; i < segment->chunk_count; i++) {
        const CUdeviceptr begin = nvs_segment_chunk_address(segment, i), end = begin + nvs_segment_chunk_bytes(segment, i);
        if (end <= address || begin >= address + bytes)
            continue;
        if (out->count++ == 0) {
            out->first = i;
            out->offset = address - begin;
        }
        out->bytes += end - begin;
    }
}

/* Locked.  Finds the chunks, checks that they can be shared now, and counts the bytes that would newly be pinned. */
static CUresult find_shareable(uint32_t gpu, nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out, uint64_t *more)
{
    *more = 0;
    if (!nvs_segment_is_listed(gpu, segment) || segment->vmm != NULL)
        return CUDA_ERROR_INVALID_VALUE;
    find_chunks(segment, address, bytes, out);
    out->segment = segment;
    for (uint32_t i = out->first; i < out->first + out->count; i++) {
        const nvs_chunk *chunk = &segment->chunks[i];
        if (!nvs_chunk_is_mapped(chunk->state))
            return CUDA_ERROR_INVALID_VALUE; /* its context is dead */
        if (chunk->state == NVS_CHUNK_RESIDENT && !nvs_swap_gpus[gpu].peers.pinned)
            *more += nvs_segment_chunk_bytes(segment, i);
    }
    return CUDA_SUCCESS;
}

CUresult nvs_share_begin(uint32_t gpu, nvs_segment *segment, CUdeviceptr address, uint64_t bytes, nvs_share *out)
{
    uint64_t more, ignored;
    nvs_swap_lock();
    CUresult result = find_shareable(gpu, segment, address, bytes, out, &more);
    nvs_swap_unlock();
    if (result != CUDA_SUCCESS)
        return result;
    if (!nvs_pins_may(gpu, more)) {
        nvs_pins_say_refused("memory shared with other processes (cuIpcGetMemHandle)");
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    nvs_swap_lock();
    result = find_shareable(gpu, segment, address, bytes, out, &ignored); /* another thread may have freed or shared it meanwhile */
    for (uint32_t i = out->first; result == CUDA_SUCCESS && i < out->first + out->count; i++) {
        segment->chunks[i].shares++;
        nvs_segment_pin_chunk(segment, i);
    }
    segment->users += result == CUDA_SUCCESS;
    nvs_swap_unlock();
    nvs_pins_counted(gpu, more);
    return result;
}

void nvs_share_end(const nvs_share *share)
{
    nvs_segment *segment = share->segment;
    nvs_swap_lock();
    for (uint32_t i = share->first; i < share->first + share->count; i++) {
        nvs_chunk *chunk = &segment->chunks[i];
        if (--chunk->shares == 0) {
            chunk->state = NVS_CHUNK_RESIDENT;
            nvs_swap_gpus[segment->gpu].pinned -= nvs_segment_chunk_bytes(segment, i);
        }
    }
    nvs_swap_unlock();
    nvs_segment_unref(segment);
}

int nvs_chunk_descriptor(const nvs_segment *segment, uint32_t chunk)
{
    CUmemGenericAllocationHandle handle;
    int descriptor = -1;
    if (NVS_REAL(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)nvs_segment_chunk_address(segment, chunk)) != CUDA_SUCCESS)
        return -1;
    if (NVS_REAL(cuMemExportToShareableHandle)(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) != CUDA_SUCCESS)
        descriptor = -1;
    NVS_REAL(cuMemRelease)(handle);
    return descriptor;
}
