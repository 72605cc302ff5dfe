/* Graphs, nodes, executables, and captures. */
#ifndef SIM_GRAPH_H
#define SIM_GRAPH_H

#include "graph/user_objects.h"
#include "module/module.h"

typedef struct sim_graph sim_graph;
typedef struct sim_node sim_node;

struct sim_node {
    uint32_t magic;
    sim_graph *graph;
    sim_node *next; /* of the graph, in the order of creation */
    uint64_t id;    /* clones keep it, so that nodes of the original graph address them */
    CUgraphNodeType type;
    sim_work work;
    sim_event *event; /* of record and wait nodes */
    sim_graph *child;
    sim_graph_memory *memory; /* of a node that allocates */
    sim_nodes dependencies;
    size_t mark; /* scratch space of traversals */
};

struct sim_graph {
    uint32_t magic;
    sim_hold *holds;
    sim_node *nodes, **last;
    size_t count;
    uint64_t id;
    bool owned; /* a child graph, destroyed with its node */
};

typedef struct sim_exec_memory { /* the memory of an executable */
    struct sim_exec_memory *next;
    uint64_t origin; /* id of the original graph */
    sim_node *const *order;
    size_t count;
    sim_device *device; /* NULL: no node allocates */
    uint64_t bytes;
    bool attached; /* the card has given the bytes */
} sim_exec_memory;

/* The parameters of a node; its type selects the member. */
typedef struct sim_node_params {
    CUcontext context; /* of copies and fills, or NULL */
    union {
        const CUDA_KERNEL_NODE_PARAMS *kernel;
        const CUDA_MEMCPY3D *copy;
        const CUDA_MEMSET_NODE_PARAMS *fill;
        const CUDA_HOST_NODE_PARAMS *host;
        CUevent event;
        CUgraph child;
        CUDA_MEM_ALLOC_NODE_PARAMS *alloc; /* dptr is an output */
        const CUdeviceptr *free;
        void *any;
    };
} sim_node_params;

/* graph.c */
sim_graph *nvs_sim_graph_new(void);
void nvs_sim_graph_free(sim_graph *graph);
CUresult nvs_sim_graph(CUgraph handle, sim_graph **out);
CUresult nvs_sim_node(CUgraphNode handle, sim_node **out);
CUresult nvs_sim_node_new(sim_graph *graph, CUgraphNodeType type, sim_node *const *dependencies, size_t count, sim_node **out);
CUresult nvs_sim_nodes_add(sim_nodes *list, sim_node *const *nodes, size_t count); /* those that the list lacks */
void nvs_sim_node_remove(sim_node *node);                            /* from its graph, and frees it */
CUresult nvs_sim_graph_clone(const sim_graph *graph, sim_graph **out);
/* All nodes, each after its dependencies; *out is to be freed.  INVALID_VALUE if there is a cycle. */
CUresult nvs_sim_graph_sort(sim_graph *graph, sim_node ***out);
bool nvs_sim_node_reaches(sim_node *from, const sim_node *ancestor);
bool nvs_sim_graph_allocates(const sim_graph *graph);

/* nodes.c */
CUresult nvs_sim_node_set(sim_node *node, sim_node_params params);
sim_node_params nvs_sim_params_of(CUgraphNodeParams *from); /* points into it */

/* graph_memory.c */
CUresult nvs_sim_exec_memory_open(sim_exec_memory *memory, const sim_graph *of, sim_node *const *order, size_t count);
void nvs_sim_exec_memory_close(sim_exec_memory *memory);
CUresult nvs_sim_exec_memory_attach(sim_exec_memory *memory);
CUresult nvs_sim_exec_memory_allocate(sim_exec_memory *memory, bool frees_first); /* at a launch */

#endif
