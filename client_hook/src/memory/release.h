/* The ways in which memory ends: freed at once, freed behind a stream, gone with its context. */
#ifndef NVS_RELEASE_H
#define NVS_RELEASE_H

#include "memory/pools/book.h"
#include "memory/quota/quota.h"
#include "memory/records/allocation.h"

/* Waits until nothing that was submitted in this context uses memory any more.  release.c */
CUresult nvs_memory_wait_idle(uint32_t gpu, CUcontext context);

/* What a pool gave out, about to be freed: claimed in the book, and no longer charged.  All that is atomic comes before the driver's call:
 * after one it would wait for what the driver has written to the device, some hundred nanoseconds. */
static inline nvs_pool_place *nvs_memory_claim_pooled(uint64_t address, nvs_pool_memory *out)
{
    nvs_pool_place *claimed = nvs_pool_book_claim(address, out);
    if (claimed != NULL)
        nvs_memory_uncharge(out->gpu, out->charged_bytes);
    return claimed;
}

/* The driver was asked to free it; says what it said. */
static inline CUresult nvs_memory_pooled_freed(nvs_pool_place *claimed, const nvs_pool_memory *memory, CUresult result)
{
    if (NVS_LIKELY(result == CUDA_SUCCESS)) {
        nvs_pool_book_remove(claimed);
        return result;
    }
    nvs_memory_charge_again(memory->gpu, memory->charged_bytes);
    nvs_pool_book_restore(claimed, memory->address);
    return result;
}

/* cuMemFree: by the backend for what it made, by the driver for everything else. */
CUresult nvs_memory_release(CUdeviceptr pointer);

/* Called by the context hooks once the driver has destroyed or reset a context: what lived in it is gone. */
void nvs_memory_context_gone(CUcontext context);

#endif
