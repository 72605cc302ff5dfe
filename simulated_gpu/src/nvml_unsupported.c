/* A weak body for every function of NVML: NVML_NOT_SUPPORTED, as of a card without the feature.  A function of nvml.c replaces it. */
#include "nvml.h"

static nvml_result not_supported(void) { return nvs_sim_nvml_ready() ? NVML_NOT_SUPPORTED : NVML_UNINITIALIZED; }

/* The bodies have no parameters, which the C calling conventions of Linux allow. */
#define NVS_SIM_NVML(name) nvml_result name(void) __attribute__((weak, alias("not_supported"), visibility("default")));
#include "nvml_names.gen.def"
