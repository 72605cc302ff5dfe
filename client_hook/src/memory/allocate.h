/* Allocation: by the backend, as a handle, in stream order. */
#ifndef NVS_ALLOCATE_H
#define NVS_ALLOCATE_H

#include "memory/records/allocation.h"

/* cuMemCreate by the backend: the handle is a number of the hook.  CUDA_ERROR_NOT_SUPPORTED: the driver must make the handle. */
CUresult nvs_memory_create(uint32_t gpu, size_t bytes, const CUmemAllocationProp *properties, CUmemGenericAllocationHandle *out);
bool nvs_memory_is_number(uint64_t handle); /* of nvs_memory_create, alive or released */

/* cuMemAlloc by the backend. */
CUresult nvs_memory_allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes);

/* The same in stream order: reuses memory whose free is deferred on the same stream (0: not known). */
CUresult nvs_memory_allocate_in_order(uint32_t gpu, CUdeviceptr *out, size_t bytes, uint64_t stream);

#endif
