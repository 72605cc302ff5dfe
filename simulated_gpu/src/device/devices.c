/* The devices of this process: those of the shared file that CUDA_VISIBLE_DEVICES names. */
#include "base/state_file.h"
#include "device/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

sim_device nvs_sim_devices[NVS_SIM_MAX_GPUS];
int nvs_sim_device_count;

/* One entry of CUDA_VISIBLE_DEVICES: the index of a card, or a prefix of a UUID.  -1: there is no such GPU. */
static int find_gpu(const nvs_sim_shared *shared, const char *word)
{
    char text[SIM_UUID_TEXT], *rest;
    if (strncasecmp(word, "GPU-", 4) == 0 || strncasecmp(word, "MIG-", 4) == 0) {
        for (uint32_t i = 0; i < shared->gpu_count; i++) {
            nvs_sim_uuid_text(shared->gpus[i].uuid, shared->gpus[i].instance != 0, text);
            if (strncasecmp(text, word, strlen(word)) == 0)
                return (int)i;
        }
        return -1;
    }
    unsigned long card = strtoul(word, &rest, 10);
    if (rest == word || *rest != '\0')
        return -1;
    for (uint32_t i = 0; i < shared->gpu_count; i++)
        if (shared->gpus[i].card == card && shared->gpus[i].instance <= 1)
            return (int)i;
    return -1;
}

static void add_device(const nvs_sim_shared *shared, uint32_t gpu)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].gpu == gpu)
            return;
    sim_device *device = &nvs_sim_devices[nvs_sim_device_count];
    device->ordinal = nvs_sim_device_count++;
    device->gpu = gpu;
    device->capacity_bytes = shared->gpus[gpu].capacity_bytes;
    device->instance = shared->gpus[gpu].instance != 0;
    memcpy(device->uuid, shared->gpus[gpu].uuid, sizeof device->uuid);
}

void nvs_sim_find_devices(const nvs_sim_shared *shared)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char copy[4096], *save = NULL;
    if (visible == NULL) {
        for (uint32_t i = 0; i < shared->gpu_count; i++)
            if (shared->gpus[i].instance <= 1) /* of a split card, the first instance is visible by default */
                add_device(shared, i);
        return;
    }
    snprintf(copy, sizeof copy, "%s", visible);
    for (char *word = strtok_r(copy, ", ", &save); word != NULL; word = strtok_r(NULL, ", ", &save)) {
        int gpu = find_gpu(shared, word);
        if (gpu < 0)
            break; /* as in CUDA, an invalid entry ends the list */
        add_device(shared, (uint32_t)gpu);
    }
}

CUresult nvs_sim_device(CUdevice ordinal, sim_device **out)
{
    if (ordinal < 0 || ordinal >= nvs_sim_device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = &nvs_sim_devices[ordinal];
    return CUDA_SUCCESS;
}

sim_device *nvs_sim_device_of_gpu(uint32_t gpu)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].gpu == gpu)
            return &nvs_sim_devices[i];
    return NULL;
}
