/* Wrappers of NVML functions: memory figures of the virtual card, in place of those of the real one.
 *
 * A GPU that this process computes on has the figures of cuMemGetInfo, by the same function of memory/memory.h.  Any other GPU, and
 * every GPU of a process without CUDA (nvidia-smi), has the limit of the environment, with nothing used; without a limit, the real
 * figures.  In lists of processes only the entry of this process changes: it has the bytes charged.
 *
 * A list has the process ids of the driver's PID namespace.  In a container with its own namespace this process is not found, and
 * the list does not change.
 */
#ifndef NVS_HOOK_NVML_H
#define NVS_HOOK_NVML_H

#include "driver/nvml.h"

void *nvs_nvml_wrapper_of(nvs_nvml_id id);

#endif
