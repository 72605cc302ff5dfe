/* Start of the simulated driver: cuInit, fork, and the calls from lower folders to higher ones.
 *
 * Before cuInit the process has no mapping and no thread.  In a child that was forked after cuInit every call returns NOT_INITIALIZED,
 * as with the real driver.
 */
#include "base/state_file.h"
#include "context/context.h"
#include "faults/faults.h"

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

SIM_EXPORT CUresult CUDAAPI cuInit(unsigned int Flags)
{
    NVS_SIM_ENTER_RAW();
    NVS_SIM_CHECK(!nvs_sim_forked, CUDA_ERROR_NOT_INITIALIZED);
    NVS_SIM_CHECK(Flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (nvs_sim_initialised)
        return CUDA_SUCCESS;
    if (nvs_sim_shared_state == NULL) {
        nvs_sim_shared_state = nvs_sim_shared_open();
        NVS_SIM_CHECK(nvs_sim_shared_state != NULL, CUDA_ERROR_SYSTEM_NOT_READY);
        pthread_atfork(before_fork, in_parent, in_child);
        (void)atexit(at_exit);
    }
    if (nvs_sim_self() == NULL) {
        nvs_sim_say("more than %u processes use this state file", NVS_SIM_MAX_PROCESSES);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (nvs_sim_device_count == 0)
        nvs_sim_find_devices(nvs_sim_shared_state);
    NVS_SIM_CHECK(nvs_sim_device_count != 0, CUDA_ERROR_NO_DEVICE);
    nvs_sim_initialised = true;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDriverGetVersion(int *driverVersion)
{
    NVS_SIM_ENTER_RAW();
    NVS_SIM_CHECK(driverVersion != NULL, CUDA_ERROR_INVALID_VALUE);
    *driverVersion = nvs_sim_settings.driver_version;
    return CUDA_SUCCESS;
}

/* The calls from lower folders to higher ones. */
static void set_hooks(void)
{
    nvs_sim_reopen_primary = nvs_sim_primary_reopen;
    nvs_sim_stream_hooks = (sim_stream_hooks){
        .effect = nvs_sim_effect,
        .synchronized = nvs_sim_pools_synchronized,
        .capture_work = nvs_sim_capture_work,
        .capture_record = nvs_sim_capture_record,
        .capture_wait = nvs_sim_capture_wait,
    };
}

/* Some calls before cuInit need the settings, and any call can have a fault. */
__attribute__((constructor)) static void prepare(void)
{
    set_hooks();
    nvs_sim_read_settings();
    nvs_sim_faults_from_environment();
}
