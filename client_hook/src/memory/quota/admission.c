/* See admission.h. */
#include "memory/quota/admission.h"

#include "memory/backends/mode.h"
#include "memory/pools/figures.h"
#include "memory/quota/deferred.h"
#include "memory/quota/graph_memory.h"
#include "memory/quota/quota.h"
#include "memory/records/ledger.h"
#include "memory/records/registry.h"

#include <stdlib.h>

static const uint64_t KEEP_DEFERRED = UINT64_C(64) << 20;
enum { KEEP_DEFERRED_COUNT = 1024 }; /* each has an event, and a record that is searched */

/* A free by the driver waits for the whole GPU.  So memory that was freed in stream order is kept for the next allocation of its size on that stream
 * (nvs_memory_allocate_in_order), until it exceeds the memory in use, or it is in many pieces. */
static bool too_much_deferred(uint32_t gpu)
{
    uint64_t deferred = nvs_registry_deferred_bytes(gpu), charged = atomic_load_explicit(&nvs_ledgers[gpu].charged, memory_order_relaxed); /* see ledger.h */
    return (deferred > KEEP_DEFERRED && deferred > charged / 2) || nvs_registry_deferred(gpu) > KEEP_DEFERRED_COUNT;
}

CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes)
{
    *charged_bytes = nvs_memory_grains(bytes);
    if (*charged_bytes == UINT64_MAX)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const bool ask = !nvs_memory_backend(gpu)->chunked;
    if (too_much_deferred(gpu))
        nvs_memory_reap(gpu, false);
    while (!nvs_quota_charge(gpu, *charged_bytes, ask))
        if (!nvs_memory_reap(gpu, true) && !nvs_graph_memory_trim(gpu) && !nvs_pools_trim(gpu)) {
            nvs_memory_log_refused(gpu, *charged_bytes, false);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    return CUDA_SUCCESS;
}

CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out)
{
    nvs_allocation *entry = nvs_allocation_new(space, kind, gpu);
    CUresult result = entry == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_memory_charge(gpu, bytes, &entry->charged_bytes);
    if (result == CUDA_SUCCESS)
        *out = entry;
    else
        free(entry);
    return result;
}
