/* The checks at the start of each public function. */
#include "entry/entry.h"

#include "entry/table.h"
#include "faults/faults.h"
#include "faults/observe.h"

_Thread_local sim_thread nvs_sim_thread;
bool nvs_sim_initialised, nvs_sim_forked, nvs_sim_ended;

CUresult nvs_sim_enter(const char *function, bool need_init)
{
    nvs_sim_thread.per_thread = nvs_sim_thread.next_per_thread;
    nvs_sim_thread.next_per_thread = false;
    nvs_sim_observe_call(function);
    CUresult injected = nvs_sim_fault(function);
    if (injected != CUDA_SUCCESS)
        return injected;
    if (nvs_sim_thread.in_callback)
        return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&nvs_sim_lock);
    if (nvs_sim_ended) {
        pthread_mutex_unlock(&nvs_sim_lock);
        return CUDA_ERROR_DEINITIALIZED;
    }
    if (!need_init || (nvs_sim_initialised && !nvs_sim_forked))
        return CUDA_SUCCESS;
    pthread_mutex_unlock(&nvs_sim_lock);
    return CUDA_ERROR_NOT_INITIALIZED;
}

int nvs_sim_unsupported(const char *function)
{
    nvs_sim_thread.next_per_thread = false;
    CUresult injected = nvs_sim_fault(function);
    return injected != CUDA_SUCCESS ? (int)injected : CUDA_ERROR_NOT_SUPPORTED;
}
