/* Threads that allocate, free, free in stream order and ask about pointers, while another evicts and restores, changes limits and
 * ends contexts.  At the end the hook's figures must be the driver's, and nothing may be left. */
#include "memory_fake.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, STEPS = 3000, OWN = 24 };

static _Atomic bool stop;

static uint32_t dice(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void *application(void *argument)
{
    uint32_t seed = (uint32_t)(uintptr_t)argument * 2654435761u + 1;
    CUdeviceptr mine[OWN] = {0};
    CUmemGenericAllocationHandle handles[4] = {0};
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = 0}};
    fake_set_context((uintptr_t)argument * 0x100);
    for (int step = 0; step < STEPS; step++) {
        unsigned slot = dice(&seed) % OWN, what = dice(&seed) % 8, h = dice(&seed) % 4;
        size_t bytes = 1 + dice(&seed) % (4u << 20);
        unsigned int answer = 0;
        if (mine[slot] != 0) {
            cuPointerGetAttribute(&answer, CU_POINTER_ATTRIBUTE_IS_MANAGED, mine[slot]);
            CUresult result = what < 4 ? cuMemFreeAsync(mine[slot], NULL) : cuMemFree_v2(mine[slot]);
            if (result != CUDA_SUCCESS)
                abort();
            mine[slot] = 0;
        } else if ((what < 3 ? cuMemAlloc_v2(&mine[slot], bytes)
                    : what < 6 ? cuMemAllocAsync(&mine[slot], bytes, NULL)
                               : cuMemAllocManaged(&mine[slot], bytes, CU_MEM_ATTACH_GLOBAL)) != CUDA_SUCCESS) {
            mine[slot] = 0;
        }
        if (handles[h] == 0) {
            if (cuMemCreate(&handles[h], 1u << 20, &prop, 0) != CUDA_SUCCESS)
                handles[h] = 0;
        } else {
            CUdeviceptr at = (CUdeviceptr)(((uintptr_t)argument << 40) + (h << 20));
            if (cuMemMap(at, 1u << 20, 0, handles[h], 0) != CUDA_SUCCESS || cuMemRelease(handles[h]) != CUDA_SUCCESS ||
                cuMemUnmap(at, 1u << 20) != CUDA_SUCCESS)
                abort();
            handles[h] = 0;
        }
    }
    for (unsigned slot = 0; slot < OWN; slot++)
        if (mine[slot] != 0 && cuMemFree_v2(mine[slot]) != CUDA_SUCCESS)
            abort();
    for (unsigned h = 0; h < 4; h++)
        if (handles[h] != 0 && cuMemRelease(handles[h]) != CUDA_SUCCESS)
            abort();
    return NULL;
}

static void *agent(void *argument)
{
    uint32_t seed = 7;
    uint64_t moved;
    nvs_usage usage;
    fake_set_context(0);
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        nvs_memory_evict(0, 1 + dice(&seed) % (64u << 20), NULL, &moved);
        nvs_memory_usage(0, &usage);
        if (usage.resident_bytes > usage.allocated_bytes || usage.pinned_bytes > usage.resident_bytes)
            abort();
        nvs_memory_set_limits(0, (dice(&seed) % 3) * (100u << 20), 0, dice(&seed) % 2);
        fake_set_events_done(dice(&seed) % 4 != 0);
        nvs_memory_restore(0, 1 + dice(&seed) % (64u << 20), NULL, &moved);
    }
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS], mover;
    nvs_usage usage;
    nvs_memory_set_limits(0, UINT64_C(100) << 20, 0, false);
    if (pthread_create(&mover, NULL, agent, NULL) != 0)
        return 1;
    for (uintptr_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, application, (void *)(i + 1)) != 0)
            return 1;
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store_explicit(&stop, true, memory_order_relaxed);
    pthread_join(mover, NULL);
    fake_set_events_done(true);
    while (nvs_memory_reap(0, false))
        continue;
    nvs_memory_usage(0, &usage);
    if (usage.allocated_bytes != 0 || usage.host_bytes != 0 || usage.pinned_bytes != 0 || fake_held() != 0) {
        printf("left: allocated %llu, evicted %llu, pinned %llu, held %llu\n", (unsigned long long)usage.allocated_bytes,
               (unsigned long long)usage.host_bytes, (unsigned long long)usage.pinned_bytes, (unsigned long long)fake_held());
        return 1;
    }
    puts("exact");
    return 0;
}
