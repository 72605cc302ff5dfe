/* Durations of copies, fences, and the end of work. */
#include "stream/work.h"

#include <stdlib.h>

#define COPY_LATENCY_NS 5000u

uint64_t nvs_sim_copy_ns(uint64_t bytes)
{
    double rate = nvs_sim_settings.copy_bytes_per_ns;
    return rate == 0 ? 0 : COPY_LATENCY_NS + (uint64_t)((double)bytes / rate);
}

sim_fence *nvs_sim_fence_new(void)
{
    sim_fence *fence = calloc(1, sizeof *fence);
    if (fence != NULL)
        fence->references = 1;
    return fence;
}

void nvs_sim_fence_unref(sim_fence *fence)
{
    if (fence != NULL && --fence->references == 0)
        free(fence);
}

void nvs_sim_discard(sim_work *work)
{
    if (work->kind == OP_COPY) {
        free(work->u.copy.snapshot);
        work->u.copy.snapshot = NULL;
    } else if (work->kind == OP_RECORD || work->kind == OP_WAIT) {
        nvs_sim_fence_unref(work->u.fence);
        work->u.fence = NULL;
    }
}
