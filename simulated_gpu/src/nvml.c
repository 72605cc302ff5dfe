/* The simulated libnvidia-ml.so.1, over the same state file: the functions that nvidia-ml-py and monitoring tools need.
 *
 * As in the real library, NVML numbers cards, and CUDA_VISIBLE_DEVICES has no effect.  A handle points into one of two fixed arrays:
 * whole cards, and MIG instances.  nvml_unsupported.c has the functions that nothing is simulated for.
 */
#include "nvml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

typedef struct nvml_device {
    uint32_t card, instance; /* instance 0: the whole card */
    bool present;
    uint64_t last_busy_ns, last_asked_ns;
} nvml_device;

static nvs_sim_shared *shared;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards last_busy_ns and last_asked_ns of the handles, and the count of users */
static unsigned users;
static nvml_device cards[NVS_SIM_MAX_GPUS], instances[NVS_SIM_MAX_GPUS];
static uint32_t card_count;

bool nvs_sim_nvml_ready(void)
{
    pthread_mutex_lock(&lock);
    bool initialised = users != 0;
    pthread_mutex_unlock(&lock);
    return initialised;
}

static bool valid(const nvml_device *device)
{
    return ((device >= cards && device < cards + NVS_SIM_MAX_GPUS) ||
            (device >= instances && device < instances + NVS_SIM_MAX_GPUS)) && device->present;
}

/* The GPU of the shared file is the device, or an instance of it. */
static bool covers(const nvml_device *device, uint32_t gpu)
{
    const nvs_sim_gpu *one = &shared->gpus[gpu];
    return one->card == device->card && (device->instance == 0 || one->instance == device->instance);
}

/* An older name of a function whose parameters are the same. */
#define SAME(older, function) extern __typeof__(function) older __attribute__((alias(#function), visibility("default")));

static nvml_result put(char *out, unsigned room, const char *text)
{
    if (out == NULL)
        return NVML_INVALID_ARGUMENT;
    if (strlen(text) >= room)
        return NVML_INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

#define REQUIRE(condition)                                                                      \
    do {                                                                                        \
        if (!nvs_sim_nvml_ready())                                                                           \
            return NVML_UNINITIALIZED;                                                          \
        if (!(condition))                                                                       \
            return NVML_INVALID_ARGUMENT;                                                       \
    } while (0)

/* A function that returns one value of a device. */
#define GETTER(name, type, condition, value)                                                    \
    SIM_EXPORT nvml_result name(nvml_device *device, type *out)                                 \
    {                                                                                           \
        REQUIRE(valid(device) && (condition) && out != NULL);                                   \
        *out = value;                                                                           \
        return NVML_SUCCESS;                                                                    \
    }

/* Start, end and versions. */

static nvml_result initialise(void)
{
    nvml_result result = NVML_SUCCESS;
    pthread_mutex_lock(&lock);
    if (shared == NULL) {
        shared = nvs_sim_shared_open();
        if (shared == NULL) {
            result = NVML_UNKNOWN;
            goto out;
        }
        for (uint32_t i = 0; i < shared->gpu_count; i++) {
            const nvs_sim_gpu *gpu = &shared->gpus[i];
            cards[gpu->card] = (nvml_device){.card = gpu->card, .present = true};
            if (gpu->card >= card_count)
                card_count = gpu->card + 1;
            if (gpu->instance != 0)
                instances[i] = (nvml_device){.card = gpu->card, .instance = gpu->instance, .present = true};
        }
    }
    users++;
out:
    pthread_mutex_unlock(&lock);
    return result;
}

SIM_EXPORT nvml_result nvmlInit_v2(void) { return initialise(); }
SAME(nvmlInit, nvmlInit_v2)
SIM_EXPORT nvml_result nvmlInitWithFlags(unsigned flags) { return initialise(); }

SIM_EXPORT nvml_result nvmlShutdown(void)
{
    nvml_result result = NVML_SUCCESS;
    pthread_mutex_lock(&lock);
    if (users == 0)
        result = NVML_UNINITIALIZED;
    else
        users--;
    pthread_mutex_unlock(&lock);
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

SIM_EXPORT nvml_result nvmlSystemGetDriverVersion(char *version, unsigned length)
{
    REQUIRE(version != NULL);
    return put(version, length, "580.00 (simulated)");
}

SIM_EXPORT nvml_result nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    const char *text = getenv("NVSHARE_SIM_DRIVER_VERSION");
    REQUIRE(version != NULL);
    *version = text != NULL && *text != '\0' ? atoi(text) : 13000;
    return NVML_SUCCESS;
}

SAME(nvmlSystemGetCudaDriverVersion, nvmlSystemGetCudaDriverVersion_v2)

/* Lookup and identity of devices. */

typedef struct nvml_pci {
    char legacy_id[16];
    uint32_t domain, bus, device, device_id, subsystem_id;
    char id[32];
} nvml_pci;

SIM_EXPORT nvml_result nvmlDeviceGetCount_v2(unsigned *count)
{
    REQUIRE(count != NULL);
    *count = card_count;
    return NVML_SUCCESS;
}
SAME(nvmlDeviceGetCount, nvmlDeviceGetCount_v2)

SIM_EXPORT nvml_result nvmlDeviceGetHandleByIndex_v2(unsigned index, nvml_device **device)
{
    REQUIRE(device != NULL && index < card_count);
    *device = &cards[index];
    return NVML_SUCCESS;
}
SAME(nvmlDeviceGetHandleByIndex, nvmlDeviceGetHandleByIndex_v2)

static void uuid_text(const nvml_device *device, char out[SIM_UUID_TEXT])
{
    uint8_t uuid[16] = {0};
    for (uint32_t i = shared->gpu_count; i-- > 0;)
        if (covers(device, i))
            memcpy(uuid, shared->gpus[i].uuid, sizeof uuid);
    if (device->instance == 0)
        uuid[5] = 0; /* the UUID of the card, even if it is split */
    nvs_sim_uuid_text(uuid, device->instance != 0, out);
}

SIM_EXPORT nvml_result nvmlDeviceGetHandleByUUID(const char *uuid, nvml_device **device)
{
    char text[SIM_UUID_TEXT];
    REQUIRE(uuid != NULL && device != NULL);
    for (uint32_t i = 0; i < 2 * NVS_SIM_MAX_GPUS; i++) {
        nvml_device *one = i < NVS_SIM_MAX_GPUS ? &cards[i] : &instances[i - NVS_SIM_MAX_GPUS];
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
    if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3 || domain != 0 || bus == 0 || bus > card_count)
        return NVML_NOT_FOUND;
    *device = &cards[bus - 1];
    return NVML_SUCCESS;
}
SAME(nvmlDeviceGetHandleByPciBusId, nvmlDeviceGetHandleByPciBusId_v2)

SIM_EXPORT nvml_result nvmlDeviceGetName(nvml_device *device, char *name, unsigned length)
{
    REQUIRE(valid(device));
    return put(name, length, device->instance != 0 ? "Simulated GPU MIG" : "Simulated GPU");
}

SIM_EXPORT nvml_result nvmlDeviceGetUUID(nvml_device *device, char *uuid, unsigned length)
{
    char text[SIM_UUID_TEXT];
    REQUIRE(valid(device));
    uuid_text(device, text);
    return put(uuid, length, text);
}

SIM_EXPORT nvml_result nvmlDeviceGetIndex(nvml_device *device, unsigned *index)
{
    REQUIRE(valid(device) && index != NULL);
    if (device->instance != 0)
        return NVML_NOT_SUPPORTED;
    *index = device->card;
    return NVML_SUCCESS;
}

GETTER(nvmlDeviceGetMinorNumber, unsigned, true, device->card)

/* Earlier versions end before the long id. */
static nvml_result pci_info(const nvml_device *device, nvml_pci *pci, size_t bytes)
{
    REQUIRE(valid(device) && pci != NULL);
    memset(pci, 0, bytes);
    pci->bus = device->card + 1;
    pci->device_id = 0x51a110deu;
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02X:00.0", pci->bus);
    if (bytes == sizeof *pci)
        snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    return NVML_SUCCESS;
}

SIM_EXPORT nvml_result nvmlDeviceGetPciInfo_v3(nvml_device *device, nvml_pci *pci) { return pci_info(device, pci, sizeof *pci); }
SIM_EXPORT nvml_result nvmlDeviceGetPciInfo_v2(nvml_device *device, nvml_pci *pci)
{
    return pci_info(device, pci, offsetof(nvml_pci, id));
}
SAME(nvmlDeviceGetPciInfo, nvmlDeviceGetPciInfo_v2)

SIM_EXPORT nvml_result nvmlDeviceGetCudaComputeCapability(nvml_device *device, int *major, int *minor)
{
    REQUIRE(valid(device) && major != NULL && minor != NULL);
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}

#define HOPPER 9
GETTER(nvmlDeviceGetArchitecture, unsigned, true, HOPPER)

/* NVML_P2P_STATUS_OK, also for a card with itself. */
SIM_EXPORT nvml_result nvmlDeviceGetP2PStatus(nvml_device *device, nvml_device *other, int capability, int *status)
{
    REQUIRE(valid(device) && valid(other) && status != NULL);
    *status = 0;
    return NVML_SUCCESS;
}

/* MIG: the instances of a split card. */

static unsigned instance_count(const nvml_device *device)
{
    unsigned count = 0;
    for (uint32_t i = 0; i < shared->gpu_count; i++)
        count += shared->gpus[i].card == device->card && shared->gpus[i].instance != 0;
    return count;
}

SIM_EXPORT nvml_result nvmlDeviceGetMigMode(nvml_device *device, unsigned *current, unsigned *pending)
{
    REQUIRE(valid(device) && current != NULL && pending != NULL);
    if (device->instance != 0)
        return NVML_INVALID_ARGUMENT;
    *current = *pending = instance_count(device) != 0;
    return NVML_SUCCESS;
}

GETTER(nvmlDeviceGetMaxMigDeviceCount, unsigned, true, 7)
GETTER(nvmlDeviceGetGpuInstanceId, unsigned, device->instance != 0, device->instance)
GETTER(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, nvml_device *, device->instance != 0, &cards[device->card])

SIM_EXPORT nvml_result nvmlDeviceGetMigDeviceHandleByIndex(nvml_device *device, unsigned index, nvml_device **out)
{
    REQUIRE(valid(device) && device->instance == 0 && out != NULL);
    for (uint32_t i = 0; i < shared->gpu_count; i++)
        if (shared->gpus[i].card == device->card && shared->gpus[i].instance == index + 1) {
            *out = &instances[i];
            return NVML_SUCCESS;
        }
    return NVML_NOT_FOUND;
}

/* Activity of a device: memory, utilization, processes. */

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

/* False: the card is integrated.  NVML has no figures of such a card's memory, but lists the memory of its processes. */
static bool memory_of(const nvml_device *device, nvml_memory *out)
{
    bool own = true;
    memset(out, 0, sizeof *out);
    nvs_sim_shared_lock(shared);
    nvs_sim_shared_reap(shared);
    for (uint32_t i = 0; i < shared->gpu_count; i++)
        if (covers(device, i)) {
            out->total += shared->gpus[i].capacity_bytes;
            out->used += nvs_sim_shared_used(shared, i);
            own = own && !shared->gpus[i].integrated;
        }
    nvs_sim_shared_unlock(shared);
    out->free = out->used < out->total ? out->total - out->used : 0;
    return own;
}

/* No function of NVML: the MemTotal and MemAvailable of a machine with the first card, where it is integrated.  Needs no nvmlInit once there
 * was one. */
SIM_EXPORT int nvs_sim_host_memory(uint64_t *total, uint64_t *available)
{
    nvml_memory memory;
    if (shared == NULL || memory_of(&cards[0], &memory))
        return 0;
    *total = memory.total;
    *available = memory.free;
    return 1;
}

SIM_EXPORT nvml_result nvmlDeviceGetMemoryInfo(nvml_device *device, nvml_memory *memory)
{
    REQUIRE(valid(device) && memory != NULL);
    return memory_of(device, memory) ? NVML_SUCCESS : NVML_NOT_SUPPORTED;
}

SIM_EXPORT nvml_result nvmlDeviceGetMemoryInfo_v2(nvml_device *device, nvml_memory_v2 *memory)
{
    nvml_memory plain;
    REQUIRE(valid(device) && memory != NULL);
    if (memory->version != (sizeof *memory | 2u << 24))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    if (!memory_of(device, &plain))
        return NVML_NOT_SUPPORTED;
    *memory = (nvml_memory_v2){.version = memory->version, .total = plain.total, .free = plain.free, .used = plain.used};
    return NVML_SUCCESS;
}

/* The share of time in which work ran, since the last call of this process. */
SIM_EXPORT nvml_result nvmlDeviceGetUtilizationRates(nvml_device *device, unsigned rates[2])
{
    nvml_memory memory;
    uint64_t busy_ns = 0, now_ns = nvs_sim_now_ns();
    REQUIRE(valid(device) && rates != NULL);
    if (device->instance != 0)
        return NVML_NOT_SUPPORTED;
    nvs_sim_shared_lock(shared);
    for (uint32_t i = 0; i < shared->gpu_count; i++)
        for (uint32_t p = 0; covers(device, i) && p < shared->processes_used; p++)
            busy_ns += shared->processes[p].busy_ns[i];
    nvs_sim_shared_unlock(shared);
    pthread_mutex_lock(&lock);
    uint64_t passed = now_ns - device->last_asked_ns;
    uint64_t worked = busy_ns > device->last_busy_ns ? busy_ns - device->last_busy_ns : 0;
    rates[0] = device->last_asked_ns == 0 || passed == 0 ? 0 : worked >= passed ? 100 : (unsigned)(worked * 100 / passed);
    device->last_asked_ns = now_ns;
    device->last_busy_ns = busy_ns;
    pthread_mutex_unlock(&lock);
    (void)memory_of(device, &memory);
    rates[1] = memory.total == 0 ? 0 : (unsigned)(memory.used * 100 / memory.total);
    return NVML_SUCCESS;
}

/* The processes of a card include those of its instances.  Without an array the function only counts.  Programs in other PID namespaces
 * than the state file's are not listed: no id of theirs means anything here. */
static nvml_result running(const nvml_device *device, unsigned *count, nvml_process *out, nvml_process_v1 *out_v1, nvml_detail *details)
{
    unsigned found = 0, room;
    REQUIRE(valid(device) && count != NULL);
    room = out != NULL || out_v1 != NULL || details != NULL ? *count : 0;
    nvs_sim_shared_lock(shared);
    nvs_sim_shared_reap(shared);
    for (uint32_t p = 0; p < shared->processes_used; p++)
        for (uint32_t i = 0; shared->processes[p].process_id != 0 && i < shared->gpu_count; i++) {
            const nvs_sim_process *process = &shared->processes[p];
            if (!covers(device, i) || process->attached[i] == 0 || process->process_id >= NVS_SIM_FOREIGN)
                continue;
            uint32_t instance = shared->gpus[i].instance;
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
    nvs_sim_shared_unlock(shared);
    *count = found;
    return found > room ? NVML_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define RUNNING(function, entry, newer, older)                                                  \
    SIM_EXPORT nvml_result function(nvml_device *device, unsigned *count, entry *out)           \
    {                                                                                           \
        return running(device, count, newer, older, NULL);                                      \
    }
RUNNING(nvmlDeviceGetComputeRunningProcesses, nvml_process_v1, NULL, out)
RUNNING(nvmlDeviceGetComputeRunningProcesses_v3, nvml_process, out, NULL)
SAME(nvmlDeviceGetComputeRunningProcesses_v2, nvmlDeviceGetComputeRunningProcesses_v3)

SIM_EXPORT nvml_result nvmlDeviceGetRunningProcessDetailList(nvml_device *device, nvml_detail_list *list)
{
    REQUIRE(valid(device) && list != NULL);
    if (list->version != (sizeof *list | 1u << 24))
        return NVML_ARGUMENT_VERSION_MISMATCH;
    return running(device, &list->count, NULL, NULL, list->entries);
}

/* No process draws; programs under MPS are listed among the others. */
SIM_EXPORT nvml_result nvmlDeviceGetGraphicsRunningProcesses_v3(nvml_device *device, unsigned *count, void *out)
{
    REQUIRE(valid(device) && count != NULL);
    *count = 0;
    return NVML_SUCCESS;
}
SAME(nvmlDeviceGetGraphicsRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses_v3)
SAME(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlDeviceGetGraphicsRunningProcesses_v3)
SAME(nvmlDeviceGetMPSComputeRunningProcesses, nvmlDeviceGetGraphicsRunningProcesses_v3)
SAME(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlDeviceGetGraphicsRunningProcesses_v3)
SAME(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlDeviceGetGraphicsRunningProcesses_v3)
