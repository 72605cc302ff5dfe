/* The functions of nvshare.h, for programs that know of the hook. */
#include "nvshare.h"

#include "base/base.h"
#include "base/process.h"
#include "coord/mailbox.h"
#include "gate/gate.h"
#include "memory/memory.h"

#include <errno.h>

NVS_EXPORT const char *nvshare_version(void)
{
    return NVS_VERSION;
}

NVS_EXPORT int nvshare_active(void)
{
    uint32_t seen = atomic_load_explicit(&nvs_agent_phase, memory_order_relaxed);
    return seen == NVS_AGENT_FAILED ? -1 : seen == NVS_AGENT_RUNNING;
}

NVS_EXPORT int nvshare_gpu_state(uint32_t gpu, struct nvshare_gpu *out)
{
    if (gpu >= NVS_MAX_GPUS || out == NULL || out->size < sizeof *out)
        return -1;
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    *out = (struct nvshare_gpu){
        .size = sizeof *out,
        .lease = atomic_load_explicit(&nvs_mail[gpu].shown_state, memory_order_relaxed),
        .lease_id = atomic_load_explicit(&nvs_mail[gpu].shown_lease, memory_order_relaxed),
        .waiters = atomic_load_explicit(&nvs_mail[gpu].shown_waiters, memory_order_relaxed),
        .waiting_threads = nvs_gate_waiting(gpu),
        .calls = nvs_gate_calls(gpu),
        .allocated_bytes = usage.allocated_bytes,
        .resident_bytes = usage.resident_bytes,
    };
    return 0;
}

NVS_EXPORT int nvshare_yield(uint32_t gpu)
{
    if (gpu >= NVS_MAX_GPUS)
        return -1;
    int saved = errno;
    if (atomic_exchange_explicit(&nvs_mail[gpu].yield, 1, memory_order_seq_cst) == 0)
        nvs_agent_poke();
    errno = saved;
    return 0;
}

NVS_EXPORT void nvshare_step(void)
{
    (void)atomic_fetch_add_explicit(&nvs_steps, 1, memory_order_relaxed); /* a count, orders nothing */
}

/* The hook's own threads move memory while the gate is closed: this is neither a bypass nor work of the application. */
NVS_EXPORT uint32_t nvshare_gate_depth(void)
{
    const nvs_slot *slot = nvs_self;
    if (slot != NULL && atomic_load_explicit(&slot->active, memory_order_relaxed) != 0) /* written by this thread only */
        return 1;
    return nvs_thread_is_own() ? UINT32_MAX : 0;
}
