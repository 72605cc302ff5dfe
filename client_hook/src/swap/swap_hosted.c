/* Chunks that have no place on the GPU and are used all the same: their memory is the host's, near the GPU, mapped at their address.
 *
 * The GPU reaches it over the link, a hundred times slower than its own.  So this is for programs that ask for it
 * (NVSHARE_OVERSUBSCRIBE), and for what is above the bound that the coordinator set (resident_limit_bytes).
 *
 * Nobody tells which pages a GPU uses: what was given a place on the card first keeps it.  To evict a hosted chunk costs nothing:
 * it takes no room of the GPU, so it stays mapped while others compute.
 *
 * May not go here: how much is to be where (backend.c, memory/memory.c).
 */
#include "swap/swap.h"

#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"

#include <stdatomic.h>

static void properties(uint32_t gpu, CUmemAllocationProp *out)
{
    int node = -1;
    if (NVS_REAL(cuDeviceGetAttribute)(&node, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, (CUdevice)gpu) != CUDA_SUCCESS || node < 0)
        node = 0; /* a machine of one node may say that it has none */
    *out = (CUmemAllocationProp){.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                 .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = node}};
}

bool nvs_hosted_works(uint32_t gpu)
{
    enum { UNKNOWN, YES, NO };
    static _Atomic uint8_t known[NVS_MAX_GPUS];
    CUmemAllocationProp prop;
    int supported = 0;
    size_t granularity = 0;
    /* Relaxed: the answer stands for itself and every thread would find the same. */
    uint8_t answer = atomic_load_explicit(&known[gpu], memory_order_relaxed);
    if (answer != UNKNOWN)
        return answer == YES;
    CUresult result = NVS_REAL(cuDeviceGetAttribute)(&supported, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, (CUdevice)gpu);
    properties(gpu, &prop);
    if (result == CUDA_SUCCESS && supported)
        result = NVS_REAL(cuMemGetAllocationGranularity)(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    if (result != CUDA_SUCCESS)
        return false; /* asked again next time */
    answer = granularity != 0 && nvs_swap_unit(gpu) % granularity == 0 ? YES : NO;
    if (answer == NO)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this driver maps no host memory for the GPU: nothing can run from the host, what does not fit is out of memory");
    atomic_store_explicit(&known[gpu], answer, memory_order_relaxed);
    return answer == YES;
}

static CUresult map(nvs_segment *segment, uint32_t chunk)
{
    CUmemAllocationProp prop;
    properties(segment->gpu, &prop);
    return nvs_chunk_map_hosted(segment, chunk, &prop);
}

CUresult nvs_hosted_back(nvs_segment *segment)
{
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < segment->chunk_count && result == CUDA_SUCCESS; i++) {
        if (!nvs_chunk_is_missing(segment->chunks[i].state))
            continue;
        result = map(segment, i);
        if (result != CUDA_SUCCESS)
            break;
        nvs_swap_lock();
        segment->chunks[i].state = NVS_CHUNK_HOSTED;
        nvs_segment_hosted(segment, (int64_t)nvs_segment_chunk_bytes(segment, i));
        nvs_swap_unlock();
    }
    return result;
}

/* --- chunks of the whole GPU, one after the other; in a context --- */

typedef struct job {
    uint32_t gpu;
    bool in;        /* to be hosted; else to be evicted */
    bool ran;
    uint64_t most, done;
    CUresult result;
} job;

/* The next chunk that the job is about; its segment has one user more. */
static bool next(const job *of, nvs_place *out)
{
    bool found = false;
    nvs_swap_lock();
    for (nvs_segment *at = nvs_swap_gpus[of->gpu].first; at != NULL && !found; at = at->next)
        for (uint32_t i = 0; i < at->chunk_count && !found; i++) {
            const uint64_t bytes = nvs_segment_chunk_bytes(at, i);
            const uint8_t state = at->chunks[i].state;
            found = bytes <= of->most - of->done && (of->in ? nvs_chunk_is_missing(state) : state == NVS_CHUNK_HOSTED);
            if (found)
                *out = (nvs_place){at, i, bytes, 0};
        }
    if (found)
        out->segment->users++;
    nvs_swap_unlock();
    return found;
}

/* Host to host, by the address that the GPU has for one end. */
static CUresult copy(const nvs_place *of, void *const *host, bool in)
{
    const nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    CUdeviceptr address = nvs_segment_chunk_address(of->segment, of->chunk);
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < chunk->grains && result == CUDA_SUCCESS; i++, address += NVS_HOST_GRAIN)
        result = in ? NVS_REAL(cuMemcpyHtoDAsync_v2)(address, host[i], NVS_HOST_GRAIN, CU_STREAM_PER_THREAD)
                    : NVS_REAL(cuMemcpyDtoHAsync_v2)(host[i], address, NVS_HOST_GRAIN, CU_STREAM_PER_THREAD);
    CUresult waited = NVS_REAL(cuStreamSynchronize)(CU_STREAM_PER_THREAD);
    return result == CUDA_SUCCESS ? waited : result;
}

static CUresult host(const nvs_place *of)
{
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    void *grains[NVS_CHUNK_GRAINS];
    const bool evicted = chunk->state == NVS_CHUNK_EVICTED;
    CUresult result = map(of->segment, of->chunk);
    if (result != CUDA_SUCCESS)
        return result;
    if (evicted && (result = copy(of, chunk->host, true)) != CUDA_SUCCESS) {
        nvs_chunk_unmap(of->segment, of->chunk); /* what was evicted is still the good one */
        return result;
    }
    nvs_swap_lock();
    chunk->state = NVS_CHUNK_HOSTED;
    for (uint32_t i = 0; i < chunk->grains; i++) {
        grains[i] = chunk->host[i];
        chunk->host[i] = NULL;
    }
    nvs_segment_hosted(of->segment, (int64_t)of->bytes);
    nvs_swap_unlock();
    if (evicted)
        nvs_host_give(chunk->grains, grains);
    return CUDA_SUCCESS;
}

static CUresult evict(const nvs_place *of)
{
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    void *grains[NVS_CHUNK_GRAINS];
    if (!nvs_host_take(of->segment->gpu, chunk->grains, grains))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = copy(of, grains, false);
    if (result == CUDA_SUCCESS)
        result = nvs_chunk_unmap(of->segment, of->chunk);
    if (result != CUDA_SUCCESS) {
        nvs_host_give(chunk->grains, grains);
        return result;
    }
    nvs_swap_lock();
    chunk->state = NVS_CHUNK_EVICTED;
    for (uint32_t i = 0; i < chunk->grains; i++)
        chunk->host[i] = grains[i];
    nvs_segment_hosted(of->segment, -(int64_t)of->bytes);
    nvs_swap_unlock();
    return CUDA_SUCCESS;
}

static bool run_in(CUcontext context, void *argument)
{
    job *of = argument;
    CUcontext ignored;
    nvs_place at;
    bool usable, ends = false;
    if (!nvs_context_enter(context))
        return true; /* another one may do */
    usable = nvs_context_error() == CUDA_SUCCESS;
    of->ran |= usable;
    while (usable && of->result == CUDA_SUCCESS && !(ends = nvs_context_ends(context)) && next(of, &at)) {
        of->result = of->in ? host(&at) : evict(&at);
        if (of->result == CUDA_SUCCESS)
            of->done += at.bytes;
        nvs_segment_let_go(at.segment);
    }
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return !usable || ends; /* as above, for the rest too */
}

static nvs_status run(job *of, uint64_t *done)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* captures of the application must not notice us */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    nvs_each_context(of->gpu, run_in, of);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    *done = of->done;
    if (of->result != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "memory could not be %s the host for the GPU (error %d); nothing is lost, the rest stays where it is",
                of->in ? "mapped on" : "taken from", (int)of->result);
    if (of->result == CUDA_ERROR_OUT_OF_MEMORY)
        return NVS_NO_MEMORY;
    return of->result == CUDA_SUCCESS && of->ran ? NVS_OK : NVS_CUDA_FAILED;
}

nvs_status nvs_hosted_bring(uint32_t gpu, uint64_t *bytes)
{
    return run(&(job){.gpu = gpu, .in = true, .most = UINT64_MAX}, bytes);
}

nvs_status nvs_hosted_give(uint32_t gpu, uint64_t bytes, uint64_t *given)
{
    nvs_swap_lock();
    const uint64_t hosted = nvs_swap_gpus[gpu].hosted;
    nvs_swap_unlock();
    nvs_host_prepare(gpu, (bytes < hosted ? bytes : hosted) / NVS_HOST_GRAIN);
    nvs_status status = run(&(job){.gpu = gpu, .most = bytes}, given);
    nvs_host_prepare(gpu, 0);
    return status;
}
