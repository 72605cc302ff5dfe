/* Chunks whose physical memory goes to another program as it is, or came from one (handdown.h).
 *
 * Whatever fails here costs nothing but the shortcut: the memory is freed, or made, as without it.
 */
#include "swap/swap.h"

#include "driver/cuda_api.h"
#include "swap/handdown.h"

#include <stdatomic.h>
#include <unistd.h>

bool nvs_heir_possible(uint32_t gpu)
{
    enum { UNKNOWN, YES, NO };
    static _Atomic uint8_t known[NVS_MAX_GPUS];
    /* Relaxed: the answer stands for itself and every thread would find the same. */
    uint8_t answer = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    if (NVS_UNLIKELY(answer == UNKNOWN)) {
        int supported = 0;
        CUresult result = NVS_REAL(cuDeviceGetAttribute)(&supported, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, (CUdevice)gpu);
        answer = result == CUDA_SUCCESS && supported ? YES : NO;
        atomic_store_explicit(&known[gpu], answer, memory_order_relaxed);
    }
    return answer == YES;
}

/* Only what is overwritten as a whole: nothing of the other program's can be read in it. */
bool nvs_heir_take(const nvs_segment *segment, uint32_t chunk, CUmemGenericAllocationHandle *handle, int *descriptor)
{
    if (segment->own != NULL || segment->chunks[chunk].state != NVS_CHUNK_EVICTED)
        return false;
    int given = nvs_inheritance_take(segment->gpu, nvs_segment_chunk_bytes(segment, chunk));
    if (given < 0)
        return false;
    if (NVS_REAL(cuMemImportFromShareableHandle)(handle, (void *)(uintptr_t)given, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != CUDA_SUCCESS) {
        close(given);
        return false;
    }
    *descriptor = nvs_descriptor_keep(given);
    return true;
}

int nvs_heir_offer(const nvs_segment *segment, uint32_t chunk)
{
    return segment->own == NULL && nvs_bequest_open(segment->gpu) ? nvs_chunk_descriptor(segment, chunk) : -1;
}

void nvs_heir_give(const nvs_segment *segment, uint32_t chunk, int offered)
{
    if (offered < 0)
        return;
    (void)nvs_bequest_give(segment->gpu, nvs_segment_chunk_bytes(segment, chunk), offered);
    close(offered);
}
