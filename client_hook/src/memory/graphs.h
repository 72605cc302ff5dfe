/* The memory that executable graphs allocate: charged before the instantiation, until the executable is destroyed.  See memory.h. */
#ifndef NVS_GRAPHS_H
#define NVS_GRAPHS_H

#include "memory/registry.h"

/* Before an instantiation, outside of a gate: charges the executable's memory.  `held` is linked by `node.next`, for the next function. */
CUresult nvs_graph_memory_admit(CUgraph graph, nvs_allocation **held);
/* After it.  `made`: NULL when it failed. */
void nvs_graph_memory_keep(CUgraphExec made, nvs_allocation *held);

/* Before an executable is destroyed, and after. */
nvs_allocation *nvs_graph_memory_take(CUgraphExec ready);
void nvs_graph_memory_taken(CUgraphExec ready, nvs_allocation *held, bool destroyed);

#endif
