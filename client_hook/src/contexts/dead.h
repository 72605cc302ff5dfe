/* Contexts with a sticky error. */
#ifndef NVS_DEAD_H
#define NVS_DEAD_H

#include "base/base.h"

/* The sticky error of the current context; CUDA_SUCCESS: it has none.  Any thread, also beside captures in relaxed mode. */
CUresult nvs_context_error(void);
/* Whether all contexts of the GPU have a sticky error.  If so, the gate lets all calls through from now on (nvs_gate_dead). */
bool nvs_gpu_look_dead(uint32_t gpu);

#endif
