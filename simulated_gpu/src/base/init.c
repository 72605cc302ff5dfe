/* Start of the driver double: settings, the visible devices, entering and leaving a call, fork.
 *
 * Nothing exists before cuInit: no mapping, no thread.  A child of a fork after cuInit has no driver: every call says
 * NOT_INITIALIZED there, as with the real one.
 */
#include "base/sim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

pthread_mutex_t nvs_sim_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t nvs_sim_done = PTHREAD_COND_INITIALIZER;
sim_settings nvs_sim_settings = {.driver_version = 13000};
sim_device nvs_sim_devices[NVS_SIM_MAX_GPUS];
int nvs_sim_device_count;
nvs_sim_shared *nvs_sim_shared_state;
_Thread_local sim_thread nvs_sim_thread;
uint64_t nvs_sim_next_id = 1;

static bool initialised, forked, settings_read;
static uint64_t thread_count;

uint64_t nvs_sim_thread_number(void)
{
    if (nvs_sim_thread.number == 0)
        nvs_sim_thread.number = ++thread_count;
    return nvs_sim_thread.number;
}

static uint64_t number_from(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    char *rest;
    if (text == NULL || *text == '\0')
        return fallback;
    unsigned long long value = strtoull(text, &rest, 0);
    if (*rest != '\0') {
        nvs_sim_say("%s=%s is not a number; using %llu", name, text, (unsigned long long)fallback);
        return fallback;
    }
    return value;
}

static void read_settings(void)
{
    const char *rate = getenv("NVSHARE_SIM_COPY_GIBPS");
    double gibps = rate != NULL && *rate != '\0' ? strtod(rate, NULL) : 20.0;
    if (settings_read)
        return;
    settings_read = true;
    nvs_sim_settings.driver_version = (int)number_from("NVSHARE_SIM_DRIVER_VERSION", 13000);
    nvs_sim_settings.kernel_ns = number_from("NVSHARE_SIM_KERNEL_NS", 20000);
    nvs_sim_settings.peers = number_from("NVSHARE_SIM_PEERS", 1) != 0;
    nvs_sim_settings.context_bytes = number_from("NVSHARE_SIM_CONTEXT_BYTES", 0);
    nvs_sim_settings.launch_queue = (uint32_t)number_from("NVSHARE_SIM_LAUNCH_QUEUE", 1024);
    nvs_sim_settings.copy_bytes_per_ns = gibps > 0 ? gibps * 1073741824.0 / 1e9 : 0;
    nvs_sim_faults_from_environment();
}

/* The lock is taken before a fork, so that the child finds it in one piece. */
static void before_fork(void) { pthread_mutex_lock(&nvs_sim_lock); }
static void in_parent(void) { pthread_mutex_unlock(&nvs_sim_lock); }
static void in_child(void)
{
    forked = initialised;
    pthread_mutex_t fresh = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t fresh_condition = PTHREAD_COND_INITIALIZER;
    nvs_sim_lock = fresh;
    nvs_sim_done = fresh_condition;
}

CUresult nvs_sim_enter(const char *function, bool need_init)
{
    nvs_sim_thread.call_per_thread = nvs_sim_thread.per_thread;
    nvs_sim_thread.per_thread = false;
    /* acquire: pairs with the release in nvs_sim_observe, the observer is filled in */
    const nvs_sim_observer *watcher = atomic_load_explicit(&nvs_sim_watcher, memory_order_acquire);
    if (watcher != NULL)
        nvs_sim_tell_call(watcher, function);
    if (atomic_load_explicit(&nvs_sim_faults_armed, memory_order_relaxed)) {
        CUresult injected = nvs_sim_fault(function);
        if (injected != CUDA_SUCCESS)
            return injected;
    }
    if (nvs_sim_thread.in_callback)
        return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&nvs_sim_lock);
    if (need_init && (!initialised || forked)) {
        pthread_mutex_unlock(&nvs_sim_lock);
        return CUDA_ERROR_NOT_INITIALIZED;
    }
    return CUDA_SUCCESS;
}

void nvs_sim_leave(void) { pthread_mutex_unlock(&nvs_sim_lock); }

static void uuid_text(const nvs_sim_gpu *gpu, char out[48])
{
    const uint8_t *u = gpu->uuid;
    snprintf(out, 48, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x",
             gpu->instance != 0 ? "MIG" : "GPU", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11],
             u[12], u[13], u[14], u[15]);
}

/* One word of CUDA_VISIBLE_DEVICES: an index of a card, or the beginning of a UUID.  -1: not there. */
static int find_gpu(const nvs_sim_shared *shared, const char *word)
{
    char text[48], *rest;
    if (strncasecmp(word, "GPU-", 4) == 0 || strncasecmp(word, "MIG-", 4) == 0) {
        for (uint32_t i = 0; i < shared->gpu_count; i++) {
            uuid_text(&shared->gpus[i], text);
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
    pthread_condattr_t attributes;
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].gpu == gpu)
            return;
    sim_device *device = &nvs_sim_devices[nvs_sim_device_count];
    device->ordinal = nvs_sim_device_count++;
    device->gpu = gpu;
    device->capacity_bytes = shared->gpus[gpu].capacity_bytes;
    device->instance = shared->gpus[gpu].instance != 0;
    memcpy(device->uuid, shared->gpus[gpu].uuid, sizeof device->uuid);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&device->work, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void find_devices(const nvs_sim_shared *shared)
{
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    char copy[4096], *save = NULL;
    if (visible == NULL) {
        for (uint32_t i = 0; i < shared->gpu_count; i++)
            if (shared->gpus[i].instance <= 1) /* of a split card a process sees one instance, unless it names another */
                add_device(shared, i);
        return;
    }
    snprintf(copy, sizeof copy, "%s", visible);
    for (char *word = strtok_r(copy, ", ", &save); word != NULL; word = strtok_r(NULL, ", ", &save)) {
        int gpu = find_gpu(shared, word);
        if (gpu < 0)
            break; /* as CUDA does: those before the first invalid one count */
        add_device(shared, (uint32_t)gpu);
    }
}

SIM_EXPORT CUresult CUDAAPI cuInit(unsigned int Flags)
{
    NVS_SIM_ENTER_RAW();
    const char *problem = NULL;
    NVS_SIM_CHECK(!forked, CUDA_ERROR_NOT_INITIALIZED);
    NVS_SIM_CHECK(Flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (initialised)
        return nvs_sim_return(CUDA_SUCCESS);
    read_settings();
    if (nvs_sim_shared_state == NULL) {
        nvs_sim_shared_state = nvs_sim_shared_open(&problem);
        if (nvs_sim_shared_state == NULL) {
            nvs_sim_say("%s", problem);
            return nvs_sim_return(CUDA_ERROR_SYSTEM_NOT_READY);
        }
        pthread_atfork(before_fork, in_parent, in_child);
    }
    if (!nvs_sim_registered()) {
        nvs_sim_say("more than %u processes use this state file", NVS_SIM_MAX_PROCESSES);
        return nvs_sim_return(CUDA_ERROR_OUT_OF_MEMORY);
    }
    if (nvs_sim_device_count == 0)
        find_devices(nvs_sim_shared_state);
    NVS_SIM_CHECK(nvs_sim_device_count != 0, CUDA_ERROR_NO_DEVICE);
    initialised = true;
    nvs_sim_leave();
    nvs_sim_inject();
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
    NVS_SIM_ENTER_RAW();
    read_settings();
    NVS_SIM_CHECK(driverVersion != NULL, CUDA_ERROR_INVALID_VALUE);
    *driverVersion = nvs_sim_settings.driver_version;
    return nvs_sim_return(CUDA_SUCCESS);
}

CUresult nvs_sim_device(CUdevice ordinal, sim_device **out)
{
    if (ordinal < 0 || ordinal >= nvs_sim_device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *out = &nvs_sim_devices[ordinal];
    return CUDA_SUCCESS;
}

/* The settings are needed by calls that come before cuInit, and its faults by any. */
__attribute__((constructor)) static void prepare(void) { read_settings(); }
