/* The ways in which memory begins: by the backend, as a handle, in the order of a stream. */
#ifndef NVS_ALLOCATE_H
#define NVS_ALLOCATE_H

#include "memory/records/allocation.h"

/* cuMemCreate through the backend: an entry whose key is a number of ours.  CUDA_ERROR_NOT_SUPPORTED: this handle must be the
 * driver's. */
CUresult nvs_memory_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, CUmemGenericAllocationHandle *out);
bool nvs_memory_is_number(uint64_t handle); /* one that nvs_memory_create gave out once */

/* cuMemAlloc through the backend. */
CUresult nvs_memory_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes);

/* The same in stream order: memory whose free is deferred behind the same stream (0: not known which) serves again at once. */
CUresult nvs_memory_allocate_in_order(uint32_t gpu, CUdeviceptr *out, size_t bytes, uint64_t stream);

#endif
