/* What the driver opens at its start: the state file, and its devices, which are those of the shared file that CUDA_VISIBLE_DEVICES names.
 *
 * Before cuInit the process has no mapping and no thread.  In a child that was forked after cuInit every call returns NOT_INITIALIZED,
 * as with the real driver.
 */
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

void nvs_sim_device_place(sim_device *device, uint32_t gpu)
{
    const nvs_sim_gpu *on = &nvs_sim_shared_state->gpus[gpu];
    device->gpu = gpu;
    device->capacity_bytes = on->capacity_bytes;
    device->instance = on->instance != 0;
    memcpy(device->uuid, on->uuid, sizeof device->uuid);
}

static void add_device(const nvs_sim_shared *shared, uint32_t gpu)
{
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].gpu == gpu)
            return;
    sim_device *device = &nvs_sim_devices[nvs_sim_device_count];
    device->ordinal = nvs_sim_device_count++;
    device->card = shared->gpus[gpu].card;
    nvs_sim_device_place(device, gpu);
}

static void find_devices(const nvs_sim_shared *shared)
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

/* The lock is held during a fork, so the child finds consistent state. */
static void before_fork(void) { pthread_mutex_lock(&nvs_sim_lock); }
static void in_parent(void) { pthread_mutex_unlock(&nvs_sim_lock); }
static void in_child(void)
{
    nvs_sim_forked = nvs_sim_initialised;
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t fresh_condition = PTHREAD_COND_INITIALIZER;
    nvs_sim_lock = fresh;
    nvs_sim_done = fresh_condition;
}

/* As measured on driver 580: handlers that were registered before cuInit, and destructors, find the driver ended. */
static void at_exit(void)
{
    pthread_mutex_lock(&nvs_sim_lock);
    nvs_sim_ended = true;
    pthread_mutex_unlock(&nvs_sim_lock);
}

CUresult nvs_sim_state_open(void)
{
    if (nvs_sim_shared_state != NULL)
        return CUDA_SUCCESS;
    nvs_sim_shared_state = nvs_sim_shared_open();
    NVS_SIM_CHECK(nvs_sim_shared_state != NULL, CUDA_ERROR_SYSTEM_NOT_READY);
    pthread_atfork(before_fork, in_parent, in_child);
    (void)atexit(at_exit);
    return CUDA_SUCCESS;
}

CUresult nvs_sim_devices_open(void)
{
    NVS_SIM_TRY(nvs_sim_state_open());
    if (nvs_sim_self == NULL && (nvs_sim_self = nvs_sim_shared_self(nvs_sim_shared_state)) == NULL) {
        nvs_sim_say("more than %u processes use this state file", NVS_SIM_MAX_PROCESSES);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    nvs_sim_self->mps_priority = nvs_sim_settings.mps.priority;
    if (nvs_sim_device_count == 0)
        find_devices(nvs_sim_shared_state);
    return nvs_sim_device_count != 0 ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

SIM_EXPORT CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
    NVS_SIM_ENTER_RAW();
    NVS_SIM_CHECK(driverVersion != NULL, CUDA_ERROR_INVALID_VALUE);
    *driverVersion = nvs_sim_settings.driver_version;
    return CUDA_SUCCESS;
}

/* Some calls before cuInit need the settings, and any call can have a fault. */
__attribute__((constructor)) static void prepare(void)
{
    nvs_sim_read_settings();
    nvs_sim_faults_from_environment();
}

/* Properties of a device, which has compute capability 9.0. */

NVS_SIM_GETTER(cuDeviceGet, (CUdevice *device, int ordinal), sim_device *found, nvs_sim_device(ordinal, &found), device, ordinal)

NVS_SIM_GETTER(cuDeviceGetCount, (int *count), , CUDA_SUCCESS, count, nvs_sim_device_count)

SIM_EXPORT CUresult CUDAAPI cuDeviceGetName(char *name, int len, CUdevice dev)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(name != NULL && len > 0, CUDA_ERROR_INVALID_VALUE);
    snprintf(name, (size_t)len, "%s", device->instance ? "Simulated GPU MIG" : "Simulated GPU");
    return CUDA_SUCCESS;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice dev)
{
    sim_device *device;
    CUresult result = uuid == NULL ? CUDA_ERROR_INVALID_VALUE : nvs_sim_device(dev, &device);
    if (result == CUDA_SUCCESS)
        memcpy(uuid->bytes, device->uuid, sizeof uuid->bytes);
    return result;
}

/* For a MIG instance the first version returns the UUID of the card, the second that of the instance. */
SIM_EXPORT CUresult CUDAAPI cuDeviceGetUuid(CUuuid *uuid, CUdevice dev)
{
    NVS_SIM_ENTER();
    CUresult result = uuid_of(uuid, dev);
    if (result == CUDA_SUCCESS && nvs_sim_devices[dev].instance)
        uuid->bytes[5] = 0; /* as in nvml.c */
    return result;
}

NVS_SIM_ENTRY(cuDeviceGetUuid_v2, (CUuuid *uuid, CUdevice dev), uuid_of(uuid, dev))

NVS_SIM_GETTER(cuDeviceTotalMem_v2, (size_t *bytes, CUdevice dev), sim_device *device, nvs_sim_device(dev, &device), bytes,
               device->capacity_bytes)

/* The attributes that are not 0. */
static const struct {
    CUdevice_attribute attribute;
    int value;
} attributes[] = {
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y, 1024},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z, 64},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z, 65535},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK, 49152},
    {CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY, 65536},
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, 2147483647},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK, 65536},
    {CU_DEVICE_ATTRIBUTE_CLOCK_RATE, 1500000},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_GPU_OVERLAP, 1},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE1D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_WIDTH, 131072},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_HEIGHT, 65536},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_WIDTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_HEIGHT, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE3D_DEPTH, 16384},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_WIDTH, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_HEIGHT, 32768},
    {CU_DEVICE_ATTRIBUTE_MAXIMUM_TEXTURE2D_LAYERED_LAYERS, 2048},
    {CU_DEVICE_ATTRIBUTE_SURFACE_ALIGNMENT, 512},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS, 1},
    {CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, 2000000},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, 4096},
    {CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE, 33554432},
    {CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 2048},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 2},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_TEXTURE_PITCH_ALIGNMENT, 32},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GLOBAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_LOCAL_L1_CACHE_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, 233472},
    {CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR, 65536},
    {CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO, 2},
    {CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS, 1},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1},
    {CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN, 232448},
    {CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR, 32},
    {CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK, 1024},
    {CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_MEMPOOL_SUPPORTED_HANDLE_TYPES, 1},
    {CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH, 1},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_FUNCTION_POINTERS, 1},
    {CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
};

/* NVSHARE_SIM_ATTRIBUTES: what cards without a feature answer, such as 102=0 without virtual memory management. */
static void override(CUdevice_attribute attribute, int *value)
{
    const char *at = getenv("NVSHARE_SIM_ATTRIBUTES");
    int number, wanted, length;
    for (; at != NULL && sscanf(at, "%d=%d%n", &number, &wanted, &length) == 2; at += *at == ',') {
        at += length;
        if (number == (int)attribute)
            *value = wanted;
    }
    if (at != NULL && *at != '\0')
        nvs_sim_say("NVSHARE_SIM_ATTRIBUTES: '%s' does not begin with NUMBER=VALUE; it is ignored", at);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetAttribute(int *pi, CUdevice_attribute attrib, CUdevice dev)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(pi != NULL && (int)attrib > 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK((int)attrib < CU_DEVICE_ATTRIBUTE_MAX, CUDA_ERROR_INVALID_VALUE);
    *pi = 0;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i].attribute == attrib)
            *pi = attributes[i].value;
    if (attrib == CU_DEVICE_ATTRIBUTE_INTEGRATED)
        *pi = (int)nvs_sim_shared_state->gpus[device->gpu].integrated;
    override(attrib, pi);
    if (attrib == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)
        *pi = (int)device->card + 1;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceComputeCapability(int *major, int *minor, CUdevice dev)
{
    CUresult result = cuDeviceGetAttribute(major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, dev);
    if (result != CUDA_SUCCESS)
        return result;
    return cuDeviceGetAttribute(minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, dev);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetByPCIBusId(CUdevice *dev, const char *pciBusId)
{
    unsigned domain = 0, bus, slot;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(dev != NULL && pciBusId != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(sscanf(pciBusId, "%x:%x:%x", &domain, &bus, &slot) == 3 || sscanf(pciBusId, "%x:%x", &bus, &slot) == 2,
                  CUDA_ERROR_INVALID_VALUE);
    for (*dev = 0; *dev < nvs_sim_device_count; ++*dev)
        if (nvs_sim_devices[*dev].card + 1 == bus)
            return CUDA_SUCCESS;
    return CUDA_ERROR_INVALID_DEVICE;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetPCIBusId(char *pciBusId, int len, CUdevice dev)
{
    NVS_SIM_ENTER_FIND(sim_device *device, nvs_sim_device(dev, &device));
    NVS_SIM_CHECK(pciBusId != NULL && len >= 13, CUDA_ERROR_INVALID_VALUE);
    snprintf(pciBusId, (size_t)len, "0000:%02x:00.0", device->card + 1);
    return CUDA_SUCCESS;
}
