/* Begin and end of a public function. */
#ifndef SIM_ENTRY_H
#define SIM_ENTRY_H

#include "base/base.h"

typedef struct sim_thread {
    bool next_per_thread; /* set by a _ptsz or _ptds entry point for the next call */
    bool per_thread;      /* in this call, the NULL stream is the per-thread default stream */
    bool in_callback;     /* the thread runs host functions: no call is permitted */
    uint32_t depth;       /* its calls that have not returned; above 1 in functions that libcudart has registered */
} sim_thread;

extern _Thread_local sim_thread nvs_sim_thread;
extern bool nvs_sim_initialised, nvs_sim_forked; /* forked: after cuInit; every call then fails */
extern bool nvs_sim_ended;                       /* exit() has come to the handler that cuInit registered; every call then fails */

extern bool nvs_sim_locked, nvs_sim_failed; /* device/checkpoint.c: new calls wait on nvs_sim_done, or fail */
extern uint32_t nvs_sim_calls;               /* threads inside calls */

/* Observer and faults come first.  On success the lock is held; otherwise it is free. */
CUresult nvs_sim_enter(const char *function, bool need_init);
CUresult nvs_sim_hold(void); /* takes the lock for a function that is not in the table of entry points; always CUDA_SUCCESS */

static inline void nvs_sim_leave(const CUresult *entered)
{
    if (*entered != CUDA_SUCCESS)
        return;
    if (--nvs_sim_thread.depth == 0 && --nvs_sim_calls == 0 && nvs_sim_locked)
        pthread_cond_broadcast(&nvs_sim_done);
    pthread_mutex_unlock(&nvs_sim_lock);
}

/* A public function begins with one of these.  Its return drops the lock, after the value of the return is computed. */
#define NVS_SIM_HOLD_LOCK(entering) __attribute__((cleanup(nvs_sim_leave))) const CUresult entered = (entering)
#define NVS_SIM_ENTER_ANY(need_init)                                                            \
    NVS_SIM_HOLD_LOCK(nvs_sim_enter(__func__, need_init));                                      \
    NVS_SIM_TRY(entered)
#define NVS_SIM_ENTER() NVS_SIM_ENTER_ANY(true)
#define NVS_SIM_ENTER_RAW() NVS_SIM_ENTER_ANY(false) /* before cuInit, too */
#define NVS_SIM_ENTER_FIND(declaration, lookup)                                                 \
    declaration;                                                                                \
    NVS_SIM_ENTER();                                                                            \
    NVS_SIM_TRY(lookup)

/* A public function that consists of one expression. */
#define NVS_SIM_ENTRY(name, parameters, ...)                                                    \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER();                                                                        \
        return __VA_ARGS__;                                                                     \
    }

/* A public function that stores one value of the object that `lookup` finds. */
#define NVS_SIM_GETTER(name, parameters, declaration, lookup, out, value)                       \
    SIM_EXPORT CUresult CUDAAPI name parameters                                                 \
    {                                                                                           \
        NVS_SIM_ENTER_FIND(declaration, lookup);                                                \
        NVS_SIM_CHECK((out) != NULL, CUDA_ERROR_INVALID_VALUE);                                 \
        *(out) = (value);                                                                       \
        return CUDA_SUCCESS;                                                                    \
    }

/* Defines a function that finds the object of a handle. */
#define NVS_SIM_DEFINE_FIND(name, handle_type, type, mark, error)                               \
    CUresult name(handle_type handle, type **out)                                               \
    {                                                                                           \
        type *object = (type *)(void *)handle;                                                  \
        NVS_SIM_CHECK(object != NULL && object->magic == (mark), error);                        \
        *out = object;                                                                          \
        return CUDA_SUCCESS;                                                                    \
    }

#define NVS_SIM_CHECK(condition, result)                                                        \
    do {                                                                                        \
        if (!(condition))                                                                       \
            return (result);                                                                    \
    } while (0)
#define NVS_SIM_TRY(expression)                                                                 \
    do {                                                                                        \
        const CUresult tried = (expression);                                                    \
        if (tried != CUDA_SUCCESS)                                                              \
            return tried;                                                                       \
    } while (0)

#endif
