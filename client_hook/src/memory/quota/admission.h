/* Before an allocation: charges it, and frees memory for it that is not used any more. */
#ifndef NVS_ADMISSION_H
#define NVS_ADMISSION_H

#include "memory/records/allocation.h"

/* A registry entry with its bytes charged; CUDA_ERROR_OUT_OF_MEMORY over the limit.  Exactly one of nvs_memory_keep and nvs_memory_drop follows. */
CUresult nvs_memory_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);
/* The same without an entry: only charges the bytes. */
CUresult nvs_memory_charge(uint32_t gpu, uint64_t bytes, uint64_t *charged_bytes);

#endif
