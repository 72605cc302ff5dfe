/* The end of memory: freed at once, in stream order, or with its context. */
#ifndef NVS_RELEASE_H
#define NVS_RELEASE_H

#include "base/hot.h"
#include "memory/pools/book.h"
#include "memory/pools/figures.h"
#include "memory/quota/quota.h"
#include "memory/records/allocation.h"

/* Waits for all work that was submitted in this context. */
CUresult nvs_memory_wait_idle(uint32_t gpu, CUcontext context);

/* Before the free of a pool's memory: claims its place and uncharges it.  Atomics come before the call of the driver: after it they would wait some
 * hundred nanoseconds for the driver's writes to the device. */
static inline nvs_pool_place *nvs_memory_claim_pooled(uint64_t address, nvs_pool_memory *out)
{
    nvs_pool_place *claimed = nvs_pool_book_claim(address, out);
    if (claimed != NULL)
        nvs_memory_uncharge(out->gpu, out->charged_bytes);
    return claimed;
}

/* After that free: returns the driver's result. */
static inline CUresult nvs_memory_pooled_freed(nvs_pool_place *claimed, const nvs_pool_memory *memory, CUresult result)
{
    if (NVS_LIKELY(result == CUDA_SUCCESS)) {
        nvs_pool_book_remove(claimed);
        if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.pools, memory_order_relaxed) == NVS_POOLS_SLOW)) /* see its declaration */
            nvs_pools_freed(memory->gpu, memory->charged_bytes);
        return result;
    }
    nvs_memory_charge_again(memory->gpu, memory->charged_bytes);
    nvs_pool_book_restore(claimed, memory->address);
    return result;
}

/* cuMemFree: by the backend for its memory, else by the driver. */
CUresult nvs_memory_release(CUdeviceptr pointer);

/* After the driver has ended or reset a context, and the memory in it. */
void nvs_memory_context_gone(CUcontext context);

#endif
