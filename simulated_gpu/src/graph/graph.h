/* Graphs, their nodes, what is instantiated from them, and captures that make them. */
#ifndef SIM_GRAPH_H
#define SIM_GRAPH_H

#include "base/sim.h"

struct sim_node {
    uint32_t magic;
    sim_graph *graph;
    sim_node *next; /* of the graph, in the order of creation */
    uint64_t id;    /* kept by clones, so that an exec and a clone find their origin */
    CUgraphNodeType type;
    sim_work work;
    sim_event *event; /* of record and wait nodes */
    sim_graph *child;
    sim_graph_memory *memory; /* of a node that allocates */
    uint64_t values[3]; /* of a kernel: the parameters that nvs_sim_kernel_work looked at */
    void *arguments[3];
    CUDA_KERNEL_NODE_PARAMS kernel;
    CUDA_MEMCPY3D copy;
    CUDA_MEMSET_NODE_PARAMS fill;
    sim_node **dependencies;
    size_t dependency_count;
    size_t mark; /* scratch of walks */
};

struct sim_graph {
    uint32_t magic;
    sim_node *nodes, **last;
    size_t count;
    uint64_t id;
    bool owned; /* a child graph: it goes with its node */
    size_t mark;
};

struct sim_capture {
    struct sim_capture *next;
    uint64_t id;
    uint64_t thread;
    CUstreamCaptureMode mode;
    sim_graph *graph;
    sim_stream *origin;
    bool into_existing; /* the graph was there before: it is not ours to destroy */
    bool invalid;
};

typedef struct sim_graph_hold { /* the memory of an executable; graph_memory.c */
    struct sim_graph_hold *next;
    uint64_t origin; /* id of the graph that it was made from */
    sim_node *const *order;
    size_t count;
    sim_device *device; /* NULL: it allocates nothing */
    uint64_t bytes;
    bool attached; /* the card has given them */
} sim_graph_hold;

sim_graph *nvs_sim_graph_new(void);
void nvs_sim_graph_free(sim_graph *graph);
CUresult nvs_sim_graph_find(CUgraph handle, sim_graph **out);
CUresult nvs_sim_node_find(CUgraphNode handle, sim_node **out);
CUresult nvs_sim_node_new(sim_graph *graph, CUgraphNodeType type, sim_node *const *dependencies, size_t count, sim_node **out);
CUresult nvs_sim_node_depend(sim_node *node, sim_node *dependency); /* idempotent */
void nvs_sim_node_free(sim_node *node);                              /* it is in no graph any more */
CUresult nvs_sim_graph_clone(const sim_graph *graph, sim_graph **out);
/* All nodes, each after what it depends on; *out is to be freed.  INVALID_VALUE when there is a cycle. */
CUresult nvs_sim_graph_sort(sim_graph *graph, sim_node ***out);
bool nvs_sim_node_reaches(sim_node *from, const sim_node *ancestor);
CUresult nvs_sim_node_set_kernel(sim_node *node, const CUDA_KERNEL_NODE_PARAMS *params);
CUresult nvs_sim_node_set_general(sim_node *node, const CUgraphNodeParams *params);
/* `params` may be the event or the child itself; the context is that of copies and fills, or NULL. */
CUresult nvs_sim_node_set_raw(sim_node *node, CUgraphNodeType type, const void *params, CUcontext context);

/* graph_memory.c */
bool nvs_sim_graph_allocates(const sim_graph *graph);
CUresult nvs_sim_graph_hold(sim_graph_hold *hold, const sim_graph *of, sim_node *const *order, size_t count);
void nvs_sim_graph_release(sim_graph_hold *hold);
CUresult nvs_sim_graph_attach(sim_graph_hold *hold);
CUresult nvs_sim_graph_allocate(sim_graph_hold *hold, bool frees_first); /* at a launch */

/* copy_shapes.c */
CUresult nvs_sim_copy_from_3d(const CUDA_MEMCPY3D *shape, sim_copy *out);
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *by, sim_work *out);
CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *by, sim_work *out);

#endif
