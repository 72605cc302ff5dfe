/* Which GPUs the work of a graph is on, in a program that uses several.
 *
 * Why: a launch names one stream, and so one GPU; what the graph does on others must have their leases, too.  The driver tells nothing of a node whose
 * kernel is given as a function, so it is noted where nodes are added: that they run where the current context is, unless they name
 * another one, is how runtimes add them.
 *
 * One lock, taken with no other.  Without host memory a graph is taken for one of its stream's GPU alone.
 *
 * May not go here: what a node does; programs with one GPU.
 */
#ifndef NVS_GRAPH_GPUS_H
#define NVS_GRAPH_GPUS_H

#include "gate/gate.h"

#include <stdatomic.h>

/* Of graphs and of those that are ready to run (CUgraph, CUgraphExec): sets of GPUs, a bit each. */
uint32_t nvs_graph_gpus(const void *graph);
void nvs_graph_runs_on(const void *graph, uint32_t gpus); /* these as well */
void nvs_graph_gone(const void *graph);

/* The same of calls with this result, where there are several GPUs (hook_graph_gpus.c).  No context: the current one's GPU. */
void nvs_graph_node_added(CUresult result, CUgraph graph, CUcontext context);
void nvs_graph_child_added(CUresult result, CUgraph graph, CUgraph child);
/* A graph is on these: in mode `swap` their memory stays on the cards from now on, as a lease may be lost before a launch (swap/rights.c). */
void nvs_graph_keep_memory(uint32_t gpus);

/* Ready to run, and what of: from here on nvs_graph_enter knows it.  Its GPUs, if there are others than `current`, else 0: then it is not kept, as
 * most are launched where they were made ready, and a launch is to cost nothing. */
uint32_t nvs_graph_ready(CUgraphExec ready, CUgraph graph, uint32_t current);

extern _Atomic uint32_t nvs_graphs_apart __attribute__((visibility("hidden"))); /* ready ones that are kept; relaxed: made before they are launched */
nvs_slot *nvs_graph_enter_all(CUgraphExec ready, uint32_t gpu);

/* nvs_gate_enter for a launch on this GPU, and the gates of the graph's other GPUs with it.  Where the leases of all do not come together after some
 * tries it is this GPU's alone: nobody waits for ever. */
static inline nvs_slot *nvs_graph_enter(CUgraphExec ready, uint32_t gpu)
{
    if (NVS_LIKELY(atomic_load_explicit(&nvs_graphs_apart, memory_order_relaxed) == 0)) /* see its declaration */
        return nvs_gate_enter(gpu);
    return nvs_graph_enter_all(ready, gpu);
}

typedef struct nvs_graph_launch {
    uint32_t gpu; /* the stream's */
    CUstream stream;
    bool per_thread;
    CUresult result;
} nvs_graph_launch;

void nvs_graph_leave_all(nvs_slot *slot, CUgraphExec ready, const nvs_graph_launch *launch);

/* After the launch, before nvs_gate_leave. */
static inline void nvs_graph_leave(nvs_slot *slot, CUgraphExec ready, const nvs_graph_launch *launch)
{
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_graphs_apart, memory_order_relaxed) != 0) || /* as above */
        NVS_UNLIKELY(slot != NULL && atomic_load_explicit(&slot->also, memory_order_relaxed) != 0)) /* written by this thread only */
        nvs_graph_leave_all(slot, ready, launch);
}

void nvs_graphs_after_fork(void); /* in the child: none */

#endif
