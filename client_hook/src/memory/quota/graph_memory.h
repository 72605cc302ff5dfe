/* The quota of memory that graphs allocate.
 *
 * A node that allocates reserves an address (measured on a driver 580, docs/decisions/graph-memory.md).  The driver allocates when an executable is first
 * uploaded or launched, and keeps the memory after the executable is destroyed, until a trim.  An allocation that its graph does not free outlives both.
 * So each GPU is charged with the larger of two figures:
 *  - the memory that all executables need at once, from their instantiation on;
 *  - the memory that the driver holds for graphs.
 * The driver's figure has the frees.  Unneeded memory is trimmed before an allocation is refused, and at an eviction.
 *
 * Non-goals: on which GPUs a graph runs (hooks/work/graph_gpus.h).
 */
#ifndef NVS_GRAPH_MEMORY_H
#define NVS_GRAPH_MEMORY_H

#include "memory/records/allocation.h"

#include <stdatomic.h>

/* The process has made a node that allocates: from now on the nodes of each graph are read before its instantiation.  Relaxed: the thread that
 * instantiates a graph has its handle from the thread that made the node. */
extern _Atomic bool nvs_graphs_allocate __attribute__((visibility("hidden")));

static inline void nvs_graph_allocates(void)
{
    atomic_store_explicit(&nvs_graphs_allocate, true, memory_order_relaxed); /* see its declaration */
}

/* Updates the charge: the driver's figure may have changed. */
void nvs_graph_memory_learn(uint32_t gpu);
/* Makes the driver free memory that no executable needs.  True: the charge is smaller. */
bool nvs_graph_memory_trim(uint32_t gpu);

void nvs_graph_memory_after_fork(void); /* in the child: none */

#endif
