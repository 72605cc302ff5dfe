/* Activity of a device: memory, utilization, processes. */
#include "nvml/nvml.h"

#include <string.h>

typedef struct nvml_memory {
    uint64_t total, free, used;
} nvml_memory;

typedef struct nvml_memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
} nvml_memory_v2;

typedef struct nvml_process_v1 {
    uint32_t process_id;
    uint64_t used;
} nvml_process_v1;

typedef struct nvml_process {
    uint32_t process_id;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
} nvml_process;

typedef struct nvml_detail {
    nvml_process process;
    uint64_t used_protected;
} nvml_detail;

typedef struct nvml_detail_list {
    uint32_t version, mode, count;
    nvml_detail *entries;
} nvml_detail_list;

static void memory_of(const nvml_device *device, nvml_memory *out)
{
    memset(out, 0, sizeof *out);
    nvs_sim_shared_lock(nvs_nvml_shared);
    nvs_sim_shared_reap(nvs_nvml_shared);
    for (uint32_t i = 0; i < nvs_nvml_shared->gpu_count; i++)
        if (nvs_nvml_covers(device, i)) {
            out->total += nvs_nvml_shared->gpus[i].capacity_bytes;
            out->used += nvs_sim_shared_used(nvs_nvml_shared, i);
        }
    nvs_sim_shared_unlock(nvs_nvml_shared);
    out->free = out->used < out->total ? out->total - out->used : 0;
}

SIM_EXPORT nvml_result nvmlDeviceGetMemoryInfo(nvml_device *device, nvml_memory *memory)
{
    REQUIRE(nvs_nvml_valid(device) && memory != NULL);
    memory_of(device, memory);
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlDeviceGetMemoryInfo_v2(nvml_device *device, nvml_memory_v2 *memory)
{
    nvml_memory plain;
    REQUIRE(nvs_nvml_valid(device) && memory != NULL);
    if (memory->version != (sizeof *memory | 2u << 24))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    memory_of(device, &plain);
    *memory = (nvml_memory_v2){.version = memory->version, .total = plain.total, .free = plain.free, .used = plain.used};
    return NVML_SUCCESS;
}

/* The share of time in which work ran, since the last call of this process. */
SIM_EXPORT nvml_result nvmlDeviceGetUtilizationRates(nvml_device *device, unsigned rates[2])
{
    nvml_memory memory;
    uint64_t busy_ns = 0, now_ns = nvs_sim_now_ns();
    REQUIRE(nvs_nvml_valid(device) && rates != NULL);
    if (device->instance != 0)
        return NVML_NOT_SUPPORTED;
    nvs_sim_shared_lock(nvs_nvml_shared);
    for (uint32_t i = 0; i < nvs_nvml_shared->gpu_count; i++)
        for (uint32_t p = 0; nvs_nvml_covers(device, i) && p < nvs_nvml_shared->processes_used; p++)
            busy_ns += nvs_nvml_shared->processes[p].busy_ns[i];
    nvs_sim_shared_unlock(nvs_nvml_shared);
    pthread_mutex_lock(&nvs_nvml_lock);
    uint64_t passed = now_ns - device->last_asked_ns;
    uint64_t worked = busy_ns > device->last_busy_ns ? busy_ns - device->last_busy_ns : 0;
    rates[0] = device->last_asked_ns == 0 || passed == 0 ? 0 : worked >= passed ? 100 : (unsigned)(worked * 100 / passed);
    device->last_asked_ns = now_ns;
    device->last_busy_ns = busy_ns;
    pthread_mutex_unlock(&nvs_nvml_lock);
    memory_of(device, &memory);
    rates[1] = memory.total == 0 ? 0 : (unsigned)(memory.used * 100 / memory.total);
    return NVML_SUCCESS;
}

/* The processes of a card include those of its instances.  Without an array the function only counts. */
static nvml_result running(const nvml_device *device, unsigned *count, nvml_process *out, nvml_process_v1 *out_v1, nvml_detail *details)
{
    unsigned found = 0, room;
    REQUIRE(nvs_nvml_valid(device) && count != NULL);
    room = out != NULL || out_v1 != NULL || details != NULL ? *count : 0;
    nvs_sim_shared_lock(nvs_nvml_shared);
    nvs_sim_shared_reap(nvs_nvml_shared);
    for (uint32_t p = 0; p < nvs_nvml_shared->processes_used; p++)
        for (uint32_t i = 0; nvs_nvml_shared->processes[p].process_id != 0 && i < nvs_nvml_shared->gpu_count; i++) {
            const nvs_sim_process *process = &nvs_nvml_shared->processes[p];
            if (!nvs_nvml_covers(device, i) || process->attached[i] == 0)
                continue;
            uint32_t instance = nvs_nvml_shared->gpus[i].instance;
            uint64_t used = process->fixed_bytes[i] + process->paged_bytes[i];
            const nvml_process one = {process->process_id, used, instance != 0 ? instance : UINT32_MAX,
                                      instance != 0 ? 0 : UINT32_MAX};
            if (found < room && out != NULL)
                out[found] = one;
            if (found < room && details != NULL)
                details[found] = (nvml_detail){.process = one};
            if (found < room && out_v1 != NULL)
                out_v1[found] = (nvml_process_v1){process->process_id, used};
            found++;
        }
    nvs_sim_shared_unlock(nvs_nvml_shared);
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define RUNNING(function, entry, newer, older)                                                  \
    SIM_EXPORT nvml_result function(nvml_device *device, unsigned *count, entry *out)           \
    {                                                                                           \
        return running(device, count, newer, older, NULL);                                      \
    }
RUNNING(nvmlDeviceGetComputeRunningProcesses, nvml_process_v1, NULL, out)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v2, nvml_process, out, NULL)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, nvml_process, out, NULL)

SIM_EXPORT nvml_result nvmlDeviceGetRunningProcessDetailList(nvml_device *device, nvml_detail_list *list)
{
    REQUIRE(nvs_nvml_valid(device) && list != NULL);
    if (list->version != (sizeof *list | 1u << 24))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    return running(device, &list->count, NULL, NULL, list->entries);
}

SIM_EXPORT nvml_result nvmlDeviceGetGraphicsRunningProcesses_v3(nvml_device *device, unsigned *count, nvml_process *out)
{
    REQUIRE(nvs_nvml_valid(device) && count != NULL);
    *count = 0;
    return NVML_SUCCESS;
}
