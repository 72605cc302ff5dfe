/* Contexts with a sticky error. */
#ifndef NVS_DEAD_H
#define NVS_DEAD_H

#include "base/base.h"

/* The sticky error of the current context; CUDA_SUCCESS: none.  Any thread; during captures only in relaxed mode. */
CUresult nvs_context_error(void);
/* True: all contexts of the GPU have a sticky error.  The gate then lets all calls through (nvs_gate_dead). */
bool nvs_gpu_check_dead(uint32_t gpu);

#endif
