/* Answers about memory in chunks, for other wrappers. */
#ifndef NVS_HOOK_SWAP_H
#define NVS_HOOK_SWAP_H

#include "memory/records/allocation.h"

/* cuPointerGetAttribute of memory in chunks. */
CUresult nvs_pointer_answer(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer);

/* Another GPU may now reach what a pool gave out, also what it gave before in chunks.  Waits for the lease, once. */
void nvs_swap_pool_opened(CUmemoryPool pool, uint32_t accessor, uint32_t gave); /* `gave`: GPUs, by bit, where any pool gave such */

#endif
