/* See host_functions.h. */
#include "gate/host_functions.h"

#include "base/base.h"
#include "base/config.h"
#include "base/process.h"
#include "gate/gate.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

enum { BUCKETS = 256 };
#define GRAPH_PATIENCE_NS 20000000u /* longer than work that pacing lets into the queues */

typedef struct running { /* on the stack of its thread */
    struct running *next;
    nvs_host_function what;
    uint64_t since_ns;
} running;

_Atomic uint32_t nvs_host_functions_count[NVS_MAX_GPUS];

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "host functions" in base/base.h: of the next two */
NVS_FORK_STATE static running *all;
static nvs_host_function *of_graphs[BUCKETS]; /* by data */

/* ---- What is in a queue or a graph ---- */

nvs_host_function *nvs_host_function_queued(const nvs_host_function *what)
{
    const int saved = errno;
    nvs_host_function *made = nvs_config.enabled && what->gpu < NVS_MAX_GPUS && (what->function != NULL || what->callback != NULL)
                                  ? malloc(sizeof *made) : NULL;
    if (made != NULL)
        *made = *what;
    errno = saved;
    return made;
}

nvs_host_function *nvs_host_function_in_graph(uint32_t gpu, CUhostFn function, void *data)
{
    const nvs_host_function what = {.function = function, .data = data, .gpu = gpu};
    nvs_host_function **const bucket = &of_graphs[(uintptr_t)data >> 4 & (BUCKETS - 1)];
    pthread_mutex_lock(&lock);
    nvs_host_function *found = *bucket;
    while (found != NULL && (found->function != function || found->data != data || found->gpu != gpu))
        found = found->next;
    if (found == NULL && (found = nvs_host_function_queued(&what)) != NULL) {
        found->next = *bucket;
        *bucket = found;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

/* ---- Running ---- */

static void list(running *here)
{
    pthread_mutex_lock(&lock);
    here->next = all;
    all = here;
    atomic_fetch_add_explicit(&nvs_host_functions_count[here->what.gpu], 1, memory_order_relaxed); /* see its declaration */
    pthread_mutex_unlock(&lock);
}

/* Unlists the function if the work behind it may start.  A drain goes on until this thread has left the gate, and then finds the stream busy. */
static bool unlist(running *here, bool always)
{
    running **link = &all;
    pthread_mutex_lock(&lock);
    nvs_slot *const slot = nvs_gate_enter_nowait(here->what.gpu);
    const bool may = always || slot == NULL || nvs_gate_lets_on(here->what.gpu);
    while (*link != here)
        link = &(*link)->next;
    if (may) {
        *link = here->next;
        atomic_fetch_sub_explicit(&nvs_host_functions_count[here->what.gpu], 1, memory_order_relaxed); /* see its declaration */
    }
    nvs_gate_leave_nowait(slot);
    pthread_mutex_unlock(&lock);
    return may;
}

static void run(const nvs_host_function *what, CUstream stream, CUresult status)
{
    running here = {.what = *what, .since_ns = nvs_now_ns()};
    nvs_slot *const slot = nvs_gate_enter_host();
    if (slot != NULL)
        list(&here);
    if (here.what.function != NULL)
        here.what.function(here.what.data);
    else
        here.what.callback(stream, status, here.what.data);
    if (slot == NULL)
        return;
    nvs_gate_leave_nowait(slot);
    slot->stop = NVS_STOP_AT_EXIT; /* the driver's exit handler may wait for this thread */
    while (!unlist(&here, slot->stop == NVS_STOPPED))
        nvs_coordinator.wait_for_lease(here.what.gpu);
    slot->stop = NVS_STOP_NEVER;
}

void CUDA_CB nvs_host_function_run(void *argument)
{
    const nvs_host_function what = *(nvs_host_function *)argument;
    if (what.stream != NULL)
        free(argument);
    run(&what, NULL, CUDA_SUCCESS);
}

void CUDA_CB nvs_host_function_run_callback(CUstream stream, CUresult status, void *argument)
{
    const nvs_host_function what = *(nvs_host_function *)argument;
    free(argument);
    run(&what, stream, status);
}

/* ---- Drains ---- */

bool nvs_host_function_holds(CUcontext context, CUstream stream, bool blocking)
{
    bool holds = false;
    pthread_mutex_lock(&lock);
    for (const running *at = all; at != NULL && !holds; at = at->next)
        if (at->what.context == context)
            holds = at->what.stream == stream || (stream == CU_STREAM_LEGACY && at->what.blocking) || (blocking && at->what.stream == CU_STREAM_LEGACY);
    pthread_mutex_unlock(&lock);
    return holds;
}

uint32_t nvs_host_functions_of_graphs(uint32_t gpu)
{
    uint32_t count = 0;
    const uint64_t now = nvs_now_ns();
    pthread_mutex_lock(&lock);
    for (const running *at = all; at != NULL; at = at->next)
        count += at->what.gpu == gpu && at->what.stream == NULL && now - at->since_ns > GRAPH_PATIENCE_NS;
    pthread_mutex_unlock(&lock);
    return count;
}

NVS_FORK_CODE void nvs_host_functions_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    all = NULL;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        atomic_store_explicit(&nvs_host_functions_count[gpu], 0, memory_order_relaxed); /* one thread */
}
