/* Host functions of the application in the driver's queues: cuLaunchHostFunc, cuStreamAddCallback, host nodes of graphs.
 *
 * A host function may wait for anything in the program, also for a thread that waits at the closed gate.  So a drain does not wait for host functions:
 *  - the driver runs a function of ours, which calls the application's;
 *  - its thread passes all gates meanwhile;
 *  - it returns to the driver only while the lease is held, because the driver then starts the work behind it.
 * A stream whose next work is such a function is drained (docs/decisions/host-functions.md).
 *
 * Non-goals: the order of host functions; streams that wait for an event behind one.
 */
#ifndef NVS_HOST_FUNCTIONS_H
#define NVS_HOST_FUNCTIONS_H

#include "base/base.h"

#include <stdatomic.h>

typedef struct nvs_host_function { /* an application's function in a queue or a graph */
    struct nvs_host_function *next;
    CUhostFn function; /* NULL: `callback` */
    CUstreamCallback callback;
    void *data;
    uint32_t gpu;
    CUstream stream; /* CU_STREAM_LEGACY or CU_STREAM_PER_THREAD: the default one; NULL: in a graph */
    CUcontext context; /* the stream's */
    bool blocking;     /* the stream waits for the legacy stream, and it for the stream */
} nvs_host_function;

/* What the driver calls; its argument is an nvs_host_function. */
void CUDA_CB nvs_host_function_run(void *argument);
void CUDA_CB nvs_host_function_run_callback(CUstream stream, CUresult status, void *argument);

/* For one run.  NULL: the hook is disabled or has no host memory, and the driver gets the application's function. */
nvs_host_function *nvs_host_function_queued(const nvs_host_function *what);

/* For a graph, whose copies have it too: it stays, one for each function with the same data. */
nvs_host_function *nvs_host_function_in_graph(uint32_t gpu, CUhostFn function, void *data);

extern _Atomic uint32_t nvs_host_functions_count[NVS_MAX_GPUS] __attribute__((visibility("hidden"))); /* that run, or have returned without the lease */

static inline bool nvs_host_functions_run(uint32_t gpu)
{
    return NVS_UNLIKELY(atomic_load_explicit(&nvs_host_functions_count[gpu], memory_order_relaxed) != 0); /* a hint: a later look has the lock */
}

/* Gate closed.  True: a host function of the context holds up this stream, a created one or CU_STREAM_LEGACY. */
bool nvs_host_function_holds(CUcontext context, CUstream stream, bool blocking);

/* How many host functions of graphs have run for some time.  Each holds up one stream, which is not known. */
uint32_t nvs_host_functions_of_graphs(uint32_t gpu);

void nvs_host_functions_after_fork(void); /* in the child: none runs */

#endif
