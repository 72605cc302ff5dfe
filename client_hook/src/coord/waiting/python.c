/* See python.h. */
#define _GNU_SOURCE /* RTLD_DEFAULT, gettid */
#include "coord/waiting/python.h"

#include "base/process.h"
#include "base/system.h"
#include "driver/library.h"
#include "gate/gate.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

#define HANDOVER_NS 50000000u /* more than NVS_PYTHON_LOOK_NS */

typedef struct exception {
    void *type, *value, *trace;
} exception;

/* CPython's functions, found once. */
static struct {
    int (*initialized)(void);
    int (*finalizing)(void); /* may be NULL */
    void *(*own_state)(void);
    void *(*current_state)(void);
    int (*ensure)(void);
    void (*release)(int state);
    int (*check_signals)(void);
    void (*fetch)(void **type, void **value, void **trace);
    void (*restore)(void *type, void *value, void *trace);
    int (*add_pending)(int (*call)(void *argument), void *argument);
    void (*write_unraisable)(void *object);
    bool found;
} python; /* the main thread's; others read what was found before they were made */

enum { IDLE, SEEKING, GOT, TAKING };
NVS_FORK_STATE static _Atomic uint32_t gil; /* futex: whether the GIL can be had */
static uint32_t seeker_gpu;                 /* written before the seeker is made */

static bool look(void *into, const char *name)
{
    void *found = nvs_libc_dlsym() != NULL ? nvs_libc_dlsym()(RTLD_DEFAULT, name) : NULL;
    *(void **)into = found;
    return found != NULL;
}

static bool find_python(void)
{
    if (!python.found)
        python.found = look(&python.initialized, "Py_IsInitialized") && look(&python.own_state, "PyGILState_GetThisThreadState") &&
                       (look(&python.current_state, "PyThreadState_GetUnchecked") || look(&python.current_state, "_PyThreadState_UncheckedGet")) &&
                       look(&python.ensure, "PyGILState_Ensure") &&
                       look(&python.release, "PyGILState_Release") && look(&python.check_signals, "PyErr_CheckSignals") &&
                       look(&python.fetch, "PyErr_Fetch") && look(&python.restore, "PyErr_Restore") &&
                       look(&python.add_pending, "Py_AddPendingCall") && look(&python.write_unraisable, "PyErr_WriteUnraisable") &&
                       (look(&python.finalizing, "Py_IsFinalizing") || look(&python.finalizing, "_Py_IsFinalizing") || true);
    return python.found && python.initialized() && (python.finalizing == NULL || !python.finalizing()) && python.own_state() != NULL;
}

static int raise_it(void *argument)
{
    const exception raised = *(exception *)argument;
    free(argument);
    python.restore(raised.type, raised.value, raised.trace);
    return -1;
}

/* With the GIL.  The caller of the gated call does not expect an exception, so the interpreter raises it later. */
static bool run_handlers(void)
{
    if (python.check_signals() == 0)
        return false;
    exception *raised = malloc(sizeof *raised);
    if (raised != NULL) {
        python.fetch(&raised->type, &raised->value, &raised->trace);
        if (python.add_pending(raise_it, raised) == 0)
            return true;
        python.restore(raised->type, raised->value, raised->trace);
        free(raised);
    }
    python.write_unraisable(NULL);
    return false;
}

/* A thread of ours: waits for the GIL, and gives it to the main thread. */
static void *seek(void *nothing)
{
    const int state = python.ensure();
    atomic_store_explicit(&gil, GOT, memory_order_release); /* pairs with the main thread's exchange */
    nvs_gate_kick(seeker_gpu);
    nvs_futex_wait(&gil, GOT, nvs_now_ns() + HANDOVER_NS);
    uint32_t got = GOT;
    (void)atomic_compare_exchange_strong_explicit(&gil, &got, IDLE, memory_order_relaxed, memory_order_relaxed); /* nobody came */
    python.release(state);
    return nothing;
}

bool nvs_python_handlers(uint32_t gpu, bool signalled, bool *wanted)
{
    if ((!signalled && !*wanted) || syscall(SYS_gettid) != getpid() || !find_python())
        return false;
    *wanted = false;
    if (python.current_state() == python.own_state())
        return run_handlers(); /* it has waited with the GIL */
    uint32_t seen = GOT;
    if (atomic_compare_exchange_strong_explicit(&gil, &seen, TAKING, memory_order_acquire, memory_order_relaxed)) { /* pairs with seek */
        nvs_futex_wake(&gil, 1);
        const int state = python.ensure();
        atomic_store_explicit(&gil, IDLE, memory_order_relaxed); /* a handler may wait for a GPU too */
        const bool raised = run_handlers();
        python.release(state);
        return raised;
    }
    *wanted = true;
    if (seen == IDLE) {
        seeker_gpu = gpu;
        atomic_store_explicit(&gil, SEEKING, memory_order_relaxed); /* before the thread is made */
        if (nvs_thread_start(NULL, seek, NULL) != 0)
            atomic_store_explicit(&gil, IDLE, memory_order_relaxed);
    }
    return false;
}

NVS_FORK_CODE void nvs_python_after_fork(void)
{
    atomic_store_explicit(&gil, IDLE, memory_order_relaxed); /* one thread */
}
