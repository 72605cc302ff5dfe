/* The quota of memory that graphs allocate.
 *
 * A node that allocates reserves an address (measured on a driver 580, docs/decisions/graph-memory.md).  The driver gets memory when an executable
 * is first uploaded or launched, and keeps it for the device when the executable is destroyed, until somebody trims.  An allocation
 * that its graph does not free outlives both.  So each GPU is charged with the larger of two figures:
 *  - what the executables that exist need at once, from their instantiation on;
 *  - what the driver says that it holds for graphs.
 * Frees are not followed: the driver's figure has them.  What no executable needs is trimmed before an allocation is refused, and
 * when memory is to be evicted.
 *
 * Non-goals: on which GPUs a graph runs (hooks/work/graph_gpus.h).
 */
#ifndef NVS_GRAPH_MEMORY_H
#define NVS_GRAPH_MEMORY_H

#include "memory/records/allocation.h"

#include <stdatomic.h>

/* A node that allocates was made in this process: from now on graphs are looked through before they are instantiated.  Relaxed: the
 * thread that instantiates a graph got its handle from the one that made the node. */
extern _Atomic bool nvs_graphs_allocate __attribute__((visibility("hidden")));

static inline void nvs_graph_allocates(void)
{
    atomic_store_explicit(&nvs_graphs_allocate, true, memory_order_relaxed); /* see its declaration */
}

/* What the driver holds may have changed. */
void nvs_graph_memory_learn(uint32_t gpu);
/* Has the driver give back what no executable needs.  True: the GPU is charged with less. */
bool nvs_graph_memory_trim(uint32_t gpu);

void nvs_graph_memory_after_fork(void); /* in the child: none */

#endif
