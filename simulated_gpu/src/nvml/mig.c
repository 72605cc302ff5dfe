/* MIG: the instances of a split card. */
#include "nvml/nvml.h"

static unsigned instance_count(const nvml_device *device)
{
    unsigned count = 0;
    for (uint32_t i = 0; i < nvs_nvml_shared->gpu_count; i++)
        count += nvs_nvml_shared->gpus[i].card == device->card && nvs_nvml_shared->gpus[i].instance != 0;
    return count;
}

SIM_EXPORT nvml_result nvmlDeviceGetMigMode(nvml_device *device, unsigned *current, unsigned *pending)
{
    REQUIRE(nvs_nvml_valid(device) && current != NULL && pending != NULL);
    if (device->instance != 0)
        return NVML_INVALID_ARGUMENT;
    *current = *pending = instance_count(device) != 0;
    return NVML_SUCCESS;
}

GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned, true, 7)
GETTER(nvmlDeviceGetGpuInstanceId, unsigned, device->instance != 0, device->instance)
GETTER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvml_device *, device->instance != 0, &nvs_nvml_cards[device->card])

SIM_EXPORT nvml_result nvmlDeviceGetMigDeviceHandleByIndex(nvml_device *device, unsigned index, nvml_device **out)
{
    REQUIRE(nvs_nvml_valid(device) && device->instance == 0 && out != NULL);
    for (uint32_t i = 0; i < nvs_nvml_shared->gpu_count; i++)
        if (nvs_nvml_shared->gpus[i].card == device->card && nvs_nvml_shared->gpus[i].instance == index + 1) {
            *out = &nvs_nvml_instances[i];
            return NVML_SUCCESS;
        }
    return NVML_NOT_FOUND;
}
