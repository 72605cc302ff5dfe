/* What comes before memory is allocated: it is charged, and memory that nobody uses any more makes room. */
#ifndef NVS_ADMISSION_H
#define NVS_ADMISSION_H

#include "memory/records/allocation.h"

/* A registry entry with its bytes charged; CUDA_ERROR_OUT_OF_MEMORY over the limit.  Then exactly one of the next two. */
CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);
/* The same for memory that is remembered elsewhere: only the bytes, as they were charged. */
CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes);

#endif
