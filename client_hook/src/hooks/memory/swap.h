/* Answers about memory in chunks, for other wrappers. */
#ifndef NVS_HOOK_SWAP_H
#define NVS_HOOK_SWAP_H

#include "memory/registry.h"

bool nvs_in_chunks(CUdeviceptr pointer, nvs_allocation *copy); /* in live memory */
bool nvs_between_chunks(CUdeviceptr pointer); /* in addresses of the hook's where there is no live memory: an error in every call */

/* cuPointerGetAttribute of memory in chunks. */
CUresult nvs_pointer_answer(void *data, CUpointer_attribute attribute, const nvs_allocation *as, CUdeviceptr pointer);

/* Gives another GPU access to a pool's memory in chunks.  Waits for the lease, once. */
void nvs_swap_pool_opened(CUmemoryPool pool, uint32_t accessor, uint32_t gave); /* `gave`: GPUs, by bit, with such memory */

#endif
