/* Wrappers of NVML functions: the real one first; what it could not do stays as it said.  Bodies from driver/nvml_api.def. */
#include "driver/nvml.h"

#include "coord/agent.h"

static int missing(void)
{
    return nvs_nvml_symbol("nvmlDeviceGetUUID") != NULL ? NVS_NVML_FUNCTION_NOT_FOUND : NVS_NVML_LIBRARY_NOT_FOUND;
}

#define NVS_NVML(symbol, parameters, arguments, change)                                                   \
    NVS_EXPORT int symbol parameters;                                                                     \
    NVS_EXPORT int symbol parameters                                                                      \
    {                                                                                                     \
        int(*const real) parameters = (int(*) parameters)nvs_as_function(nvs_nvml_real(NVS_NVML_##symbol)); \
        if (real == NULL)                                                                                 \
            return missing();                                                                             \
        const int result = real arguments;                                                                \
        if (result == NVS_NVML_SUCCESS && nvs_config.enabled)                                             \
            change;                                                                                       \
        return result;                                                                                    \
    }
#include "driver/nvml_api.def"

void *nvs_nvml_wrapper(nvs_nvml_id id)
{
    static const nvs_function wrappers[NVS_NVML_COUNT] = {
#define NVS_NVML(symbol, parameters, arguments, change) (nvs_function)symbol,
#include "driver/nvml_api.def"
    };
    return nvs_as_address(wrappers[id]);
}
