/* Threads that enter, claim, strike and restore the same few addresses, while another ends contexts: each entry is claimed by exactly one. */
#include "memory/pools.h"

#include "must.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 4, STEPS = 100000, ADDRESSES = 4, BUCKET_BITS = NVS_POOL_BUCKET_BITS };

static uint64_t addresses[ADDRESSES]; /* of one bucket */

static _Atomic int64_t entered_bytes, struck_bytes, entered, struck, refused;

static uint32_t dice(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

static void counted(const nvs_pool_memory *memory)
{
    atomic_fetch_add(&struck_bytes, (int64_t)memory->charged_bytes);
    atomic_fetch_add(&struck, 1);
}

static void *application(void *argument)
{
    uint32_t seed = (uint32_t)(uintptr_t)argument * 2654435761u;
    nvs_pool_memory memory;
    for (int step = 0; step < STEPS; step++) {
        const uint64_t address = addresses[dice(&seed) % ADDRESSES];
        nvs_pool_place *claimed = nvs_pool_book_claim(address, &memory);
        if (claimed == NULL) {
            memory = (nvs_pool_memory){address, 1 + dice(&seed) % 1000, (CUcontext)(uintptr_t)(0x100 * (1 + dice(&seed) % 2)), 3};
            const bool done = nvs_pool_book_enter(&memory);
            atomic_fetch_add(&entered, done);
            atomic_fetch_add(&entered_bytes, done ? (int64_t)memory.charged_bytes : 0);
            atomic_fetch_add(&refused, !done);
            continue;
        }
        MUST(memory.address == address && memory.gpu == 3 && memory.charged_bytes >= 1 && memory.charged_bytes <= 1000);
        if (dice(&seed) % 4 == 0) {
            nvs_pool_book_restore(claimed, address);
            continue;
        }
        nvs_pool_book_remove(claimed);
        counted(&memory);
    }
    return NULL;
}

static _Atomic bool ending;

static void take_all_of(CUcontext context)
{
    nvs_pool_memory memory;
    for (uint32_t place = 0; nvs_pool_book_take_of(context, &place, &memory);) {
        MUST(memory.context == context);
        counted(&memory);
    }
}

static void *contexts_end(void *argument)
{
    while (!atomic_load(&ending))
        take_all_of((CUcontext)(uintptr_t)0x100);
    return NULL;
}

int main(void)
{
    pthread_t threads[THREADS], reaper;
    nvs_pool_memory memory;
    const uint64_t first = UINT64_C(0x700000000000), factor = UINT64_C(0x9e3779b97f4a7c15);
    for (uint64_t at = first, found = 0; found < ADDRESSES; at += 512)
        if (at * factor >> (64 - BUCKET_BITS) == first * factor >> (64 - BUCKET_BITS))
            addresses[found++] = at;
    nvs_pool_book_begin();
    MUST(nvs_pool_book_claim(0, &memory) == NULL && nvs_pool_book_claim(1, &memory) == NULL);
    MUST(pthread_create(&reaper, NULL, contexts_end, NULL) == 0);
    for (uintptr_t i = 0; i < THREADS; i++)
        MUST(pthread_create(&threads[i], NULL, application, (void *)(i + 1)) == 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    atomic_store(&ending, true);
    pthread_join(reaper, NULL);
    MUST(atomic_load(&struck) > 0 && atomic_load(&refused) > 0);
    take_all_of((CUcontext)(uintptr_t)0x100);
    take_all_of((CUcontext)(uintptr_t)0x200);
    MUST(atomic_load(&entered) == atomic_load(&struck) && atomic_load(&entered_bytes) == atomic_load(&struck_bytes));
    memory = (nvs_pool_memory){first, 512, NULL, 0};
    MUST(nvs_pool_book_enter(&memory));
    nvs_pools_after_fork();
    MUST(nvs_pool_book_claim(memory.address, &memory) == NULL);
    printf("sound\n");
    return 0;
}
