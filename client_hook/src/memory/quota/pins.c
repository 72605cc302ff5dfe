/* See pins.h. */
#include "memory/quota/pins.h"

#include "base/base.h"
#include "base/log.h"
#include "memory/moving.h"
#include "memory/quota/admission.h"
#include "memory/quota/quota.h"
#include "memory/records/entries.h"

#include <stdatomic.h>

/* Bytes of unanswered requests.  Relaxed: a count.  It is raised before the figures are read, so memory that is pinned meanwhile may count twice for a
 * moment, but is never missed. */
NVS_FORK_STATE static _Atomic uint64_t under_way[NVS_MAX_GPUS];

/* `more`: bytes beside those that are pinned. */
static bool may_stay(uint32_t gpu, uint64_t more)
{
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    return nvs_coordinator.reserve_pins(gpu, usage.pinned_bytes + more) != NVS_REFUSED;
}

bool nvs_pins_may(uint32_t gpu, uint64_t bytes)
{
    if (bytes == 0 || gpu >= NVS_MAX_GPUS)
        return true;
    const uint64_t before = atomic_fetch_add_explicit(&under_way[gpu], bytes, memory_order_relaxed); /* see its declaration */
    if (may_stay(gpu, before + bytes))
        return true;
    nvs_pins_counted(gpu, bytes);
    return false;
}

void nvs_pins_counted(uint32_t gpu, uint64_t bytes)
{
    if (bytes != 0 && gpu < NVS_MAX_GPUS)
        atomic_fetch_sub_explicit(&under_way[gpu], bytes, memory_order_relaxed); /* see its declaration */
}

void nvs_pins_log_refused(const char *what)
{
    const char *why = nvs_memory_take_refusal();
    if (why != NULL)
        nvs_log(NVS_LOG_WARNING, "out of memory: %s must stay on the card: %s", what, why);
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, "out of memory: %s must stay on the card, and what other programs need would not fit beside it; nvshare-ctl "
                     "memory shows who needs what: free some there", what);
}

CUresult nvs_pins_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out)
{
    CUresult result = nvs_memory_admit(space, kind, gpu, bytes, out);
    if (result != CUDA_SUCCESS)
        return result;
    /* The usage counts it as pinned already: it is charged and does not move. */
    if (gpu >= NVS_MAX_GPUS || may_stay(gpu, atomic_load_explicit(&under_way[gpu], memory_order_relaxed))) /* see its declaration */
        return CUDA_SUCCESS;
    nvs_pins_log_refused("memory of the driver's own (an array, a graph's, or a handle that cannot move)");
    nvs_memory_drop(*out);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

NVS_FORK_CODE void nvs_pins_after_fork(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) /* one thread: any order will do */
        atomic_store_explicit(&under_way[gpu], 0, memory_order_relaxed);
}
