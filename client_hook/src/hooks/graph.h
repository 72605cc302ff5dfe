/* The GPUs that graphs of this process share.
 *
 * A launch names one stream, and so one GPU.  The driver does not tell which other GPUs the graph's nodes run on.  So the process has one set of GPUs for
 * all of its graphs:
 *  - a capture that spreads to a stream of another GPU adds the GPUs of both streams;
 *  - a node that the program adds itself adds the GPU of the context that it names, or of the current context;
 *  - a launch adds the GPU of its stream, once the set has any.
 * Each launch enters the gates of all GPUs of the set and leaves a mark for them (inflight/marks.h).  An instantiation enters them too: the driver may
 * access the memory of each.  GPUs never leave the set.  It stays empty in programs that see one GPU, and in programs whose captures each have one GPU.
 *
 * Non-goals: which graph has nodes on which GPU; a graph that was captured on one GPU and is launched on another.
 */
#ifndef NVS_GRAPH_H
#define NVS_GRAPH_H

#include "gate/gate.h"

#include <stdatomic.h>

/* A bit for each GPU.  Relaxed: a graph is made before it is launched. */
extern _Atomic uint32_t nvs_graph_gpus __attribute__((visibility("hidden")));

static inline bool nvs_graphs_share_gpus(void)
{
    return NVS_UNLIKELY(atomic_load_explicit(&nvs_graph_gpus, memory_order_relaxed) != 0); /* see its declaration */
}

void nvs_graphs_run_on(uint32_t gpus); /* adds GPUs to the set */

nvs_slot *nvs_graph_enter_all(uint32_t gpu);

/* nvs_gate_enter_stoppable (`stopped` NULL: nvs_gate_enter) for a launch on this GPU, and the gates of the other GPUs of the set.  After some tries without
 * all leases at once it enters this GPU's gate alone; in mode `swap` the memory of all these GPUs stays on the cards from then on. */
static inline __attribute__((always_inline)) nvs_slot *nvs_graph_enter(uint32_t gpu, bool *stopped)
{
    return nvs_graphs_share_gpus() ? nvs_graph_enter_all(gpu) : nvs_gate_enter_stoppable(gpu, stopped);
}

/* Comes before nvs_gate_leave. */
static inline void nvs_graph_leave(nvs_slot *slot)
{
    if (nvs_graphs_share_gpus() && slot != NULL && atomic_load_explicit(&slot->also, memory_order_relaxed) != 0) /* written by this thread only */
        nvs_gate_also_leave(slot);
}

/* After a launch, before nvs_graph_leave: while the leases of the other GPUs cannot be given back. */
void nvs_graph_mark(uint32_t gpu, CUstream stream, bool per_thread);

void nvs_graphs_after_fork(void); /* in the child: empties the set */

#endif
