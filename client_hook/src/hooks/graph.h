/* The GPUs that graphs of this process share.
 *
 * A launch names one stream, and so one GPU.  The driver does not tell which other GPUs the graph's nodes run on.  So the process has one set of GPUs for
 * all of its graphs:
 *  - a capture that spreads to a stream of another GPU adds the GPUs of both streams;
 *  - a node that the program adds itself adds the GPU of the context that it names, or of the current context;
 *  - a launch adds the GPU of its stream, once the set has any.
 * The GPUs of the set are linked (gate/gate.h).  Each launch leaves a mark for them (inflight/marks.h).  GPUs never leave the set.  It stays empty in programs that see one GPU, and in programs whose captures each have one GPU.
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

/* After a launch, inside the gate. */
void nvs_graph_mark(uint32_t gpu, CUstream stream);

void nvs_graphs_after_fork(void); /* in the child: empties the set */

#endif
