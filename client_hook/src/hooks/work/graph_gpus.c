/* See graph_gpus.h. */
#include "hooks/work/graph_gpus.h"

#include "base/log.h"
#include "inflight/marks.h"
#include "memory/memory.h"
#include "swap/swap.h"

enum { TRIES = 3 };

NVS_FORK_STATE _Atomic uint32_t nvs_graph_gpus;

static bool contains(uint32_t gpus, uint32_t gpu) { return (gpus >> gpu & 1) != 0; }

void nvs_graphs_run_on(uint32_t gpus)
{
    if ((gpus & ~atomic_load_explicit(&nvs_graph_gpus, memory_order_relaxed)) == 0) /* see its declaration, as the next */
        return;
    const uint32_t all = atomic_fetch_or_explicit(&nvs_graph_gpus, gpus, memory_order_relaxed) | gpus;
    if ((all & (all - 1)) != 0)
        nvs_log(NVS_LOG_INFO, "graphs of this program use several GPUs (mask %x): each launch waits for the leases of all of them", all);
}

static uint32_t others_than(uint32_t gpu)
{
    return gpu < NVS_MAX_GPUS ? atomic_load_explicit(&nvs_graph_gpus, memory_order_relaxed) & ~(1u << gpu) : 0; /* see its declaration */
}

/* Before a launch with the lease of only one of these GPUs. */
static void do_without_leases(uint32_t gpus)
{
    NVS_LOG_ONCE(NVS_LOG_INFO, "a graph on several GPUs is launched without the leases of all of them, because the turns on these GPUs differ: "
                               "start the program with --gang");
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (contains(gpus, gpu) && nvs_memory_backend(gpu)->chunked)
            nvs_swap_pin_gpu(gpu);
}

nvs_slot *nvs_graph_enter_all(uint32_t gpu)
{
    if (gpu < NVS_MAX_GPUS)
        nvs_graphs_run_on(1u << gpu);
    const uint32_t others = others_than(gpu);
    for (int tries = 0; others != 0 && tries < TRIES; tries++) {
        /* A thread waits outside all gates: inside one it would block that lease's return. */
        for (uint32_t each = 0; each < NVS_MAX_GPUS; each++)
            if (contains(others, each))
                nvs_gate_leave(nvs_gate_enter(each), each);
        nvs_slot *slot = nvs_gate_enter(gpu);
        if (slot == NULL || nvs_gate_also_enter(slot, others))
            return slot;
        nvs_gate_leave(slot, gpu);
    }
    if (others != 0)
        do_without_leases(others | 1u << gpu);
    return nvs_gate_enter(gpu);
}

void nvs_graph_mark(uint32_t gpu, CUstream stream, bool per_thread)
{
    const uint32_t others = others_than(gpu);
    if (others != 0)
        nvs_mark_stream(others, gpu, stream, per_thread);
}

NVS_FORK_CODE void nvs_graphs_after_fork(void)
{
    atomic_store_explicit(&nvs_graph_gpus, 0, memory_order_relaxed); /* relaxed: one thread */
}
