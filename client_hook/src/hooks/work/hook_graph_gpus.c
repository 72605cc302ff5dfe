/* Wrappers by which the hook knows on which GPUs a graph's work is (graph_gpus.h); what is captured is noted in capture.c, the nodes that
 * name memory in graph_edits.c.  For a program with one GPU each is the driver's call, made in the gate where the driver may put work on the GPU.
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/which_gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "hooks/work/graph_gpus.h"
#include "memory/memory.h"
#include "memory/quota/graph_executables.h"
#include "memory/quota/graph_memory.h"
#include "swap/swap.h"

static bool noted(CUresult result)
{
    return NVS_UNLIKELY(nvs_only_gpu() == NVS_NO_GPU) && result == CUDA_SUCCESS && nvs_config.enabled;
}

void nvs_graph_node_added(CUresult result, CUgraph graph, CUcontext context)
{
    if (!noted(result))
        return;
    const uint32_t told = nvs_context_gpu(context), gpu = told != NVS_NO_GPU ? told : nvs_current_gpu();
    if (gpu < NVS_MAX_GPUS)
        nvs_graph_runs_on(graph, 1u << gpu);
}

void nvs_graph_child_added(CUresult result, CUgraph graph, CUgraph child)
{
    if (noted(result))
        nvs_graph_runs_on(graph, nvs_graph_gpus(child));
}

NVS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphAddKernelNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    nvs_graph_node_added(result, hGraph, NULL);
    return result;
}

/* The context goes with `kern`; beside a function it is ignored, and may be anything. */
NVS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                    size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphAddKernelNode_v2)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    nvs_graph_node_added(result, hGraph, result == CUDA_SUCCESS && nodeParams->func == NULL ? nodeParams->ctx : NULL);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuGraphAddChildGraphNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                     size_t numDependencies, CUgraph childGraph)
{
    const CUresult result = NVS_REAL(cuGraphAddChildGraphNode)(phGraphNode, hGraph, dependencies, numDependencies, childGraph);
    nvs_graph_child_added(result, hGraph, childGraph);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuGraphClone(CUgraph *phGraphClone, CUgraph originalGraph)
{
    const CUresult result = NVS_REAL(cuGraphClone)(phGraphClone, originalGraph);
    if (noted(result)) {
        nvs_graph_gone(*phGraphClone); /* another one's that had the same handle */
        nvs_graph_runs_on(*phGraphClone, nvs_graph_gpus(originalGraph));
    }
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuGraphCreate(CUgraph *phGraph, unsigned int flags)
{
    const CUresult result = NVS_REAL(cuGraphCreate)(phGraph, flags);
    if (noted(result))
        nvs_graph_gone(*phGraph); /* as above */
    return result;
}

/* Forgotten before the driver may give the handle to somebody else's; what fails to be destroyed is broken. */
NVS_EXPORT CUresult CUDAAPI cuGraphDestroy(CUgraph hGraph)
{
    if (noted(CUDA_SUCCESS))
        nvs_graph_gone(hGraph);
    return NVS_REAL(cuGraphDestroy)(hGraph);
}

NVS_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    if (noted(CUDA_SUCCESS))
        nvs_graph_gone(hGraphExec);
    nvs_allocation *const held = nvs_graph_memory_take(hGraphExec);
    const CUresult result = NVS_REAL(cuGraphExecDestroy)(hGraphExec);
    nvs_graph_memory_taken(hGraphExec, held, result == CUDA_SUCCESS);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuGraphAddMemAllocNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                   size_t numDependencies, CUDA_MEM_ALLOC_NODE_PARAMS *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphAddMemAllocNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    nvs_graph_allocates();
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device)
{
    const CUresult result = NVS_REAL(cuDeviceGraphMemTrim)(device);
    if (result == CUDA_SUCCESS && nvs_context_possible((uint32_t)device))
        nvs_graph_memory_learn((uint32_t)device);
    return result;
}

void nvs_graph_keep_memory(uint32_t gpus)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((gpus >> gpu & 1) != 0 && nvs_memory_backend(gpu)->chunked)
            nvs_swap_reach(gpu);
}

static void made(CUgraphExec ready, CUgraph graph, uint32_t current)
{
    const uint32_t gpus = nvs_graph_ready(ready, graph, current);
    if (gpus != 0)
        nvs_log(NVS_LOG_INFO, "a graph is on other GPUs than the current one (mask %x): a launch waits for the leases of all", gpus);
    nvs_graph_keep_memory(gpus);
}

/* In the gate: the driver may copy what the graph needs to the GPU.  Before it: an allocation may have to wait for others'. */
#define NVS_INSTANTIATE(symbol, parameters, arguments)                     \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                          \
    {                                                                      \
        nvs_allocation *held;                                              \
        CUresult result = nvs_graph_memory_admit(hGraph, &held);           \
        if (result != CUDA_SUCCESS)                                        \
            return result;                                                 \
        const uint32_t gpu = nvs_current_gpu();                            \
        nvs_slot *const slot = nvs_gate_enter(gpu);                        \
        result = NVS_REAL(symbol) arguments;                               \
        nvs_gate_leave(slot, gpu);                                         \
        nvs_graph_memory_keep(result == CUDA_SUCCESS ? *phGraphExec : NULL, held); \
        if (noted(result))                                                 \
            made(*phGraphExec, hGraph, gpu);                               \
        return result;                                                     \
    }

NVS_INSTANTIATE(cuGraphInstantiate, (CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize),
                (phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize))
NVS_INSTANTIATE(cuGraphInstantiate_v2,
                (CUgraphExec *phGraphExec, CUgraph hGraph, CUgraphNode *phErrorNode, char *logBuffer, size_t bufferSize),
                (phGraphExec, hGraph, phErrorNode, logBuffer, bufferSize))
NVS_INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec *phGraphExec, CUgraph hGraph, unsigned long long flags),
                (phGraphExec, hGraph, flags))
NVS_INSTANTIATE(cuGraphInstantiateWithParams, (CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams),
                (phGraphExec, hGraph, instantiateParams))
NVS_INSTANTIATE(cuGraphInstantiateWithParams_ptsz,
                (CUgraphExec *phGraphExec, CUgraph hGraph, CUDA_GRAPH_INSTANTIATE_PARAMS *instantiateParams),
                (phGraphExec, hGraph, instantiateParams))
