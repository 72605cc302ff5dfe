/* Wrappers of NVML functions: memory figures of the virtual card, in place of those of the real one.
 *
 * Which figures.  A GPU that this process computes on: what cuMemGetInfo says, by the same function of memory/memory.h.  Any other, and
 * every GPU of a process without CUDA (nvidia-smi): the limit of the environment, with nothing used; without one, the real
 * figures.  In lists of processes the entry of this one carries what it is charged with, those of others stay as they are.
 *
 * A list names processes as the PID namespace of the driver sees them; in a container with a namespace of its own ours is not
 * found there, and the list stays as it is.
 */
#ifndef NVS_HOOK_NVML_H
#define NVS_HOOK_NVML_H

#include "driver/nvml.h"

void *nvs_nvml_wrapper_of(nvs_nvml_id id);

#endif
