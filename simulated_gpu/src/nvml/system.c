/* Start, end and versions. */
#include "nvml/nvml.h"

#include <stdlib.h>
#include <string.h>

pthread_mutex_t nvs_nvml_lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned users;
nvs_sim_shared *nvs_nvml_shared;
nvml_device nvs_nvml_cards[NVS_SIM_MAX_GPUS], nvs_nvml_instances[NVS_SIM_MAX_GPUS];
uint32_t nvs_nvml_card_count;

static nvml_result initialise(void)
{
    nvml_result result = NVML_SUCCESS;
    pthread_mutex_lock(&nvs_nvml_lock);
    if (nvs_nvml_shared == NULL) {
        nvs_nvml_shared = nvs_sim_shared_open();
        if (nvs_nvml_shared == NULL) {
            result = NVML_UNKNOWN;
            goto out;
        }
        for (uint32_t i = 0; i < nvs_nvml_shared->gpu_count; i++) {
            const nvs_sim_gpu *gpu = &nvs_nvml_shared->gpus[i];
            nvs_nvml_cards[gpu->card] = (nvml_device){.card = gpu->card, .present = true};
            if (gpu->card >= nvs_nvml_card_count)
                nvs_nvml_card_count = gpu->card + 1;
            if (gpu->instance != 0)
                nvs_nvml_instances[i] = (nvml_device){.card = gpu->card, .instance = gpu->instance, .present = true};
        }
    }
    users++;
out:
    pthread_mutex_unlock(&nvs_nvml_lock);
    return result;
}

SIM_EXPORT nvml_result nvmlInit_v2(void) { return initialise(); }
SIM_EXPORT nvml_result nvmlInitWithFlags(unsigned flags) { return initialise(); }

SIM_EXPORT nvml_result nvmlShutdown(void)
{
    nvml_result result = NVML_SUCCESS;
    pthread_mutex_lock(&nvs_nvml_lock);
    if (users == 0)
        result = NVML_UNINITIALIZED;
    else
        users--;
    pthread_mutex_unlock(&nvs_nvml_lock);
    return result;
}

SIM_EXPORT const char *nvmlErrorString(nvml_result result)
{
    switch (result) {
    case NVML_SUCCESS: return "The operation was successful";
    case NVML_UNINITIALIZED: return "NVML was not first initialized with nvmlInit()";
    case NVML_INVALID_ARGUMENT: return "A supplied argument is invalid";
    case NVML_NOT_SUPPORTED: return "The requested operation is not available on target device";
    case NVML_NOT_FOUND: return "A query to find an object was unsuccessful";
    case NVML_INSUFFICIENT_SIZE: return "An input argument is not large enough";
    case NVML_ARGUMENT_VERSION_MISMATCH: return "The provided version is invalid or unsupported";
    default: return "An internal driver error occurred";
    }
}

bool nvs_nvml_ready(void)
{
    pthread_mutex_lock(&nvs_nvml_lock);
    bool initialised = users != 0;
    pthread_mutex_unlock(&nvs_nvml_lock);
    return initialised;
}

bool nvs_nvml_valid(const nvml_device *device)
{
    return ((device >= nvs_nvml_cards && device < nvs_nvml_cards + NVS_SIM_MAX_GPUS) ||
            (device >= nvs_nvml_instances && device < nvs_nvml_instances + NVS_SIM_MAX_GPUS)) && device->present;
}

bool nvs_nvml_covers(const nvml_device *device, uint32_t gpu)
{
    const nvs_sim_gpu *one = &nvs_nvml_shared->gpus[gpu];
    return one->card == device->card && (device->instance == 0 || one->instance == device->instance);
}

nvml_result nvs_nvml_put(char *out, unsigned room, const char *text)
{
    if (out == NULL)
        return NVML_INVALID_ARGUMENT;
    if (strlen(text) >= room)
        return NVML_INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    REQUIRE(version != NULL);
    return nvs_nvml_put(version, length, "580.00 (simulated)");
}

SIM_EXPORT nvml_result nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    const char *text = getenv("NVSHARE_SIM_DRIVER_VERSION");
    REQUIRE(version != NULL);
    *version = text != NULL && *text != '\0' ? atoi(text) : 13000;
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }
