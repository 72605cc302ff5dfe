/* Functions of wrappers for other wrappers, and for init.c. */
#ifndef NVS_HOOKS_H
#define NVS_HOOKS_H

#include "driver/nvml.h"
#include "memory/registry.h"

/* A gate in front of a function of unknown signature; `target` itself when no thunk is left. */
void *nvs_thunk_make(const char *name, void *target);

/* A wrapper whose result is one expression; in it `real` is the driver's function. */
#define NVS_WRAP(symbol, parameters, result)             \
    NVS_EXPORT CUresult CUDAAPI symbol parameters        \
    {                                                    \
        __typeof__(&symbol) const real = NVS_REAL(symbol); \
        return result;                                   \
    }

void *nvs_nvml_wrapper_of(nvs_nvml_id id);

/* --- answers about memory in chunks --- */

bool nvs_in_chunks(CUdeviceptr pointer, nvs_allocation *copy); /* in live memory */
bool nvs_between_chunks(CUdeviceptr pointer); /* in addresses of the hook's where there is no live memory: an error in every call */

/* Pins memory by its address, as one allocation; the driver's memory needs nothing.  Waits for the lease. */
CUresult nvs_pin_address(CUdeviceptr ptr, size_t size);

/* Gives another GPU access to a pool's memory in chunks.  Waits for the lease, once. */
void nvs_swap_pool_opened(CUmemoryPool pool, uint32_t accessor, uint32_t gave); /* `gave`: GPUs, by bit, with such memory */

#endif
