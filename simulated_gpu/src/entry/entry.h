/* How a public function begins and ends. */
#ifndef SIM_ENTRY_H
#define SIM_ENTRY_H

#include "base/base.h"

typedef struct sim_thread { /* what the entry points remember of the calling thread */
    bool next_per_thread; /* set by a _ptsz or _ptds entry point for the call that follows */
    bool per_thread;      /* in this call, the NULL stream is the thread's own */
    bool in_callback;     /* an executor inside a host function: no call is permitted */
} sim_thread;

extern _Thread_local sim_thread nvs_sim_thread;
extern bool nvs_sim_initialised, nvs_sim_forked; /* a child of a process that was initialised has no driver */

CUresult nvs_sim_enter(const char *function, bool need_init); /* observer and faults first; SUCCESS: the lock is held */
static inline CUresult nvs_sim_return(CUresult result)
{
    pthread_mutex_unlock(&nvs_sim_lock);
    return result;
}

#define NVS_SIM_ENTER_ANY(need_init)                                                            \
    do {                                                                                        \
        CUresult entered = nvs_sim_enter(__func__, need_init);                                  \
        if (entered != CUDA_SUCCESS)                                                            \
            return entered;                                                                     \
    } while (0)
#define NVS_SIM_ENTER_RAW() NVS_SIM_ENTER_ANY(false) /* before cuInit, too */
#define NVS_SIM_ENTER() NVS_SIM_ENTER_ANY(true)
#define NVS_SIM_CHECK(condition, result)                                                        \
    do {                                                                                        \
        if (!(condition))                                                                       \
            return nvs_sim_return(result);                                                      \
    } while (0)
#define NVS_SIM_TRY(expression)                                                                 \
    do {                                                                                        \
        CUresult tried = (expression);                                                          \
        if (tried != CUDA_SUCCESS)                                                              \
            return nvs_sim_return(tried);                                                       \
    } while (0)

#endif
