/* Lookup and identity of devices. */
#include "nvml/nvml.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

typedef struct nvml_pci {
    char legacy_id[16];
    uint32_t domain, bus, device, device_id, subsystem_id;
    char id[32];
} nvml_pci;

SIM_EXPORT nvml_result nvmlDeviceGetCount_v2(unsigned *count)
{
    REQUIRE(count != NULL);
    *count = nvs_nvml_card_count;
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_device **device)
{
    REQUIRE(device != NULL && index < nvs_nvml_card_count);
    *device = &nvs_nvml_cards[index];
    return NVML_SUCCESS;
}

static void uuid_text(const nvml_device *device, char out[SIM_UUID_TEXT])
{
    uint8_t uuid[16] = {0};
    for (uint32_t i = nvs_nvml_shared->gpu_count; i-- > 0;)
        if (nvs_nvml_covers(device, i))
            memcpy(uuid, nvs_nvml_shared->gpus[i].uuid, sizeof uuid);
    if (device->instance == 0)
        uuid[5] = 0; /* the UUID of the card, even if it is split */
    nvs_sim_uuid_text(uuid, device->instance != 0, out);
}

SIM_EXPORT nvml_result nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device **device)
{
    char text[SIM_UUID_TEXT];
    REQUIRE(uuid != NULL && device != NULL);
    for (uint32_t i = 0; i < 2 * NVS_SIM_MAX_GPUS; i++) {
        nvml_device *one = i < NVS_SIM_MAX_GPUS ? &nvs_nvml_cards[i] : &nvs_nvml_instances[i - NVS_SIM_MAX_GPUS];
        if (!one->present)
            continue;
        uuid_text(one, text);
        if (strcasecmp(text, uuid) == 0) {
            *device = one;
            return NVML_SUCCESS;
        }
    }
    return NVML_NOT_FOUND;
}

SIM_EXPORT nvml_result nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvml_device **device)
{
    unsigned domain, bus, slot;
    REQUIRE(id != NULL && device != NULL);
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3 || domain != 0 || bus == 0 || bus > nvs_nvml_card_count)
        return NVML_NOT_FOUND;
    *device = &nvs_nvml_cards[bus - 1];
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlDeviceGetName(nvml_device *device, char *name, unsigned length)
{
    REQUIRE(nvs_nvml_valid(device));
    return nvs_nvml_put(name, length, device->instance != 0 ? "Simulated GPU MIG" : "Simulated GPU");
}

SIM_EXPORT nvml_result nvmlDeviceGetUUID(nvml_device *device, char *uuid, unsigned length)
{
    char text[SIM_UUID_TEXT];
    REQUIRE(nvs_nvml_valid(device));
    uuid_text(device, text);
    return nvs_nvml_put(uuid, length, text);
}

SIM_EXPORT nvml_result nvmlDeviceGetIndex(nvml_device *device, unsigned *index)
{
    REQUIRE(nvs_nvml_valid(device) && index != NULL);
    if (device->instance != 0)
        return NVML_NOT_SUPPORTED;
    *index = device->card;
    return NVML_SUCCESS;
}

GETTER(nvmlDeviceGetMinorNumber, unsigned, true, device->card)

SIM_EXPORT nvml_result nvmlDeviceGetPciInfo_v3(nvml_device *device, nvml_pci *pci)
{
    REQUIRE(nvs_nvml_valid(device) && pci != NULL);
    memset(pci, 0, sizeof *pci);
    pci->bus = device->card + 1;
    pci->device_id = 0x51a110deu;
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", pci->bus);
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlDeviceGetCudaComputeCapability(nvml_device *device, int *major, int *minor)
{
    REQUIRE(nvs_nvml_valid(device) && major != NULL && minor != NULL);
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}
