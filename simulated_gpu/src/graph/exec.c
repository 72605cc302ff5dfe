/* Executables: a private copy of a graph, and the order in which its nodes run. */
#include "graph/graph.h"

#include <stdlib.h>

static void free_exec(sim_exec *exec)
{
    nvs_sim_exec_memory_close(&exec->memory);
    if (exec->graph != NULL)
        nvs_sim_graph_free(exec->graph);
    free(exec->order);
    free(exec->disabled);
    exec->magic = 0;
    free(exec);
}

static CUresult instantiate(CUgraphExec *out, CUgraph handle, cuuint64_t flags)
{
    sim_graph *graph;
    NVS_SIM_TRY(nvs_sim_graph(handle, &graph));
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    sim_exec *exec = calloc(1, sizeof *exec);
    if (exec == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    exec->magic = SIM_EXEC;
    exec->flags = flags;
    CUresult result = nvs_sim_graph_clone(graph, &exec->graph);
    if (result == CUDA_SUCCESS)
        result = nvs_sim_graph_sort(exec->graph, &exec->order);
    if (result == CUDA_SUCCESS && (exec->disabled = calloc(exec->graph->count + 1, sizeof *exec->disabled)) == NULL)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = nvs_sim_exec_memory_open(&exec->memory, graph, exec->order, exec->graph->count);
    if (result != CUDA_SUCCESS)
        free_exec(exec);
    else
        *out = (CUgraphExec)(void *)exec;
    return result;
}

/* Programs built with CUDA 11 call this and cuGraphExecUpdate. */
NVS_SIM_ENTRY(cuGraphInstantiate_v2, (CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize),
              instantiate(phGraphExec, hGraph, 0))

NVS_SIM_ENTRY(cuGraphInstantiateWithFlags, (CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags),
              instantiate(phGraphExec, hGraph, flags))

SIM_EXPORT CUresult CUDAAPI cuGraphInstantiateWithParams(CUgraphExec *phGraphExec, CUgraph hGraph,
                                                         CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(instantiateParams != NULL, CUDA_ERROR_INVALID_VALUE);
    CUresult result = instantiate(phGraphExec, hGraph, instantiateParams->flags);
    instantiateParams->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    instantiateParams->hErrNode_out = NULL;
    return result;
}

NVS_SIM_DEFINE_FIND(nvs_sim_exec, CUgraphExec, sim_exec, SIM_EXEC, CUDA_ERROR_INVALID_VALUE)

SIM_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    NVS_SIM_ENTER_FIND(sim_exec *exec, nvs_sim_exec(hGraphExec, &exec));
    free_exec(exec);
    return CUDA_SUCCESS;
}
