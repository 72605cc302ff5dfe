/* What the two files of the simulated NVML share. */
#ifndef SIM_NVML_H
#define SIM_NVML_H

#include "base/base.h"

typedef enum nvml_result {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_UNKNOWN = 999,
} nvml_result;

bool nvs_sim_nvml_ready(void); /* between nvmlInit and nvmlShutdown */

#endif
