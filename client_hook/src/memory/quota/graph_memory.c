/* See graph_memory.h. */
#include "memory/quota/graph_memory.h"

#include "driver/cuda_api.h"
#include "memory/quota/quota.h"
#include "memory/records/allocation.h"

NVS_FORK_STATE _Atomic bool nvs_graphs_allocate;

/* Charged beside the registry's entries.  Relaxed: whoever exchanges a value charges the difference. */
NVS_FORK_STATE static _Atomic uint64_t beyond[NVS_MAX_GPUS];

static bool any(void)
{
    return NVS_UNLIKELY(atomic_load_explicit(&nvs_graphs_allocate, memory_order_relaxed)); /* see its declaration */
}

void nvs_graph_memory_learn(uint32_t gpu)
{
    cuuint64_t reserved = 0;
    if (!any() || NVS_REAL(cuDeviceGetGraphMemAttribute)((CUdevice)gpu, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS)
        reserved = 0;
    const uint64_t needed = reserved != 0 ? nvs_allocation_charged(gpu, NVS_MEMORY_GRAPH) : 0;
    const uint64_t more = reserved > needed ? reserved - needed : 0;
    const uint64_t before = atomic_exchange_explicit(&beyond[gpu], more, memory_order_relaxed); /* see its declaration */
    if (more != before)
        nvs_memory_charge_again(gpu, more - before); /* unsigned arithmetic: right in both directions */
}

bool nvs_graph_memory_trim(uint32_t gpu)
{
    if (!any())
        return false;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a capture of this thread is not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    nvs_graph_memory_learn(gpu);
    const uint64_t before = atomic_load_explicit(&beyond[gpu], memory_order_relaxed); /* see its declaration */
    if (before != 0 && NVS_REAL(cuDeviceGraphMemTrim)((CUdevice)gpu) == CUDA_SUCCESS)
        nvs_graph_memory_learn(gpu);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    return atomic_load_explicit(&beyond[gpu], memory_order_relaxed) < before; /* as above */
}

NVS_FORK_CODE void nvs_graph_memory_after_fork(void)
{
    atomic_store_explicit(&nvs_graphs_allocate, false, memory_order_relaxed); /* one thread: any order will do */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        atomic_store_explicit(&beyond[gpu], 0, memory_order_relaxed);
}
