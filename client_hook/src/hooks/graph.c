/* Wrappers of edits of graphs that name memory, for mode `swap`; in the other modes they only call the driver.
 *
 * Edits submit no work.  But the driver checks the addresses of a node's copies, fills and values, and refuses unmapped ones.  So such an edit waits for
 * the lease and runs inside the gate.  Memory of another GPU that a node names is found here (hooks/operands.h), because a launch names
 * no memory.  Captured calls are gated themselves.
 *
 * In all modes, host nodes get a function of ours (gate/host_functions.h), the calls that add a node report its GPU (hooks/graph.h), and
 * those that instantiate and destroy graphs charge the memory that graphs allocate (memory/memory.h).
 */
#include "hooks/graph.h"

#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "gate/host_functions.h"
#include "hooks/operands.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "memory/memory.h"
#include "swap/swap.h"

/* --- the GPUs of graphs (graph.h) --- */

NVS_FORK_STATE _Atomic uint32_t nvs_graph_gpus;

void nvs_graphs_run_on(uint32_t gpus)
{
    if ((gpus & ~atomic_load_explicit(&nvs_graph_gpus, memory_order_relaxed)) == 0) /* see its declaration, as the next */
        return;
    const uint32_t all = atomic_fetch_or_explicit(&nvs_graph_gpus, gpus, memory_order_relaxed) | gpus;
    nvs_coordinator.link(all);
}

static uint32_t others_than(uint32_t gpu)
{
    return gpu < NVS_MAX_GPUS ? atomic_load_explicit(&nvs_graph_gpus, memory_order_relaxed) & ~(1u << gpu) : 0; /* see its declaration */
}

void nvs_graph_mark(uint32_t gpu, CUstream stream)
{
    const uint32_t others = others_than(gpu);
    if (others != 0)
        nvs_mark_stream(others, gpu, stream);
}

NVS_FORK_CODE void nvs_graphs_after_fork(void)
{
    atomic_store_explicit(&nvs_graph_gpus, 0, memory_order_relaxed); /* relaxed: one thread */
}

/* --- edits --- */

typedef struct named { /* the memory that an edit names; the rest is NULL */
    bool idle;         /* the node has no work, or is a child graph */
    CUcontext context; /* where the work will run */
    const CUDA_MEMCPY3D *copy;
    nvs_operand fill;
    const CUstreamBatchMemOpParams *values;
    const CUdeviceptr *targets, *sources;
    const size_t *sizes;
    size_t count; /* of values, or of pairs */
    bool beyond;  /* found: NVS_OPERANDS_BEYOND */
} named;

/* True: some of the memory moves with the turns of this GPU. */
static bool prepare(uint32_t gpu, named *what)
{
    unsigned found = nvs_operands_prepare_3d(gpu, what->copy);
    found |= nvs_operands_prepare(gpu, what->fill, (nvs_operand){0});
    if (what->values != NULL)
        found |= nvs_operands_prepare_values(gpu, what->values, what->count);
    if (what->targets != NULL)
        found |= nvs_operands_prepare_list(gpu, what->targets, what->sources, what->sizes, what->count);
    if (found & NVS_OPERANDS_UNREACHABLE)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "a graph uses memory of a GPU that its own GPU cannot access (cuDeviceCanAccessPeer): run this "
                                      "program with --memory device (NVSHARE_MEMORY=device)");
    what->beyond = (found & NVS_OPERANDS_BEYOND) != 0;
    return (found & NVS_OPERANDS_MOVE) != 0;
}

/* The GPU whose gate must be open while the driver checks the addresses; NVS_NO_GPU: none, since no such memory moves.  If the edit does not name the
 * GPU of the work, every GPU of the program counts. */
static uint32_t gate_for(named *what)
{
    const uint32_t known = nvs_context_gpu(what->context);
    uint32_t gate = NVS_NO_GPU;
    if (what->copy == NULL && what->fill.address == 0 && what->values == NULL && what->targets == NULL)
        return NVS_NO_GPU;
    if (known != NVS_NO_GPU)
        gate = prepare(known, what) ? known : NVS_NO_GPU;
    for (uint32_t gpu = 0; known == NVS_NO_GPU && gpu < NVS_MAX_GPUS; gpu++)
        if (nvs_any_context(gpu) != NULL && prepare(gpu, what))
            gate = gpu;
    return gate;
}

static nvs_operand target_of(const CUDA_MEMSET_NODE_PARAMS *params)
{
    if (params == NULL)
        return (nvs_operand){0};
    const bool any = params->width != 0 && params->height != 0;
    return (nvs_operand){params->dst, any ? (params->height - 1) * params->pitch + params->width * params->elementSize : 0};
}

static named of_params(const CUgraphNodeParams *params)
{
    named what = {.context = NULL};
    switch (params != NULL ? (int)params->type : -1) {
    case CU_GRAPH_NODE_TYPE_KERNEL: /* the driver ignores the context beside a function */
        what.context = params->kernel.func == NULL ? params->kernel.ctx : NULL;
        break;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL: what.context = params->conditional.ctx; break;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        what.context = params->memcpy.copyCtx;
        what.copy = &params->memcpy.copyParams;
        break;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        what.context = params->memset.ctx;
        what.fill = target_of(&(CUDA_MEMSET_NODE_PARAMS){params->memset.dst, params->memset.pitch, 0, params->memset.elementSize,
                                                         params->memset.width, params->memset.height});
        break;
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        what.context = params->memOp.ctx;
        what.values = params->memOp.paramArray;
        what.count = params->memOp.count;
        break;
#if CUDA_VERSION >= 13050
    case CU_GRAPH_NODE_TYPE_MEMCPY_BATCH: /* ignores its context, which may be a green one: the two look the same */
        what.targets = params->memcpyBatch.dsts;
        what.sources = params->memcpyBatch.srcs;
        what.sizes = params->memcpyBatch.sizes;
        what.count = params->memcpyBatch.count;
        break;
#endif
    default: what.idle = true; break;
    }
    return what;
}

static named of_values(const CUDA_BATCH_MEM_OP_NODE_PARAMS *params)
{
    return params != NULL ? (named){.context = params->ctx, .values = params->paramArray, .count = params->count} : (named){.context = NULL};
}

/* For edits that add no node; in the others a parameter of this name hides it. */
static const CUgraph hGraph = NULL;

static void allocates_nothing(const void *params) {}

static void may_allocate(const CUgraphNodeParams *params)
{
    if (params != NULL && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        nvs_graph_allocates();
}

/* For edits whose parameters have another name. */
static const void *const nodeParams = NULL;
#define NVS_MAY_ALLOCATE() _Generic((nodeParams), CUgraphNodeParams *: may_allocate, default: allocates_nothing)(nodeParams)

static void node_added(CUresult result, CUcontext context)
{
    if (NVS_LIKELY(nvs_only_gpu() != NVS_NO_GPU) || result != CUDA_SUCCESS || !nvs_config.enabled)
        return;
    const uint32_t known = nvs_context_gpu(context), gpu = known != NVS_NO_GPU ? known : nvs_current_gpu();
    if (gpu < NVS_MAX_GPUS)
        nvs_graphs_run_on(1u << gpu);
}

static CUresult added(CUresult result, named what)
{
    if (!what.idle)
        node_added(result, what.context);
    return result;
}

static CUDA_HOST_NODE_PARAMS ours(const CUDA_HOST_NODE_PARAMS *params)
{
    nvs_captures_mark_threads();
    nvs_host_function *const made = params->fn != NULL ? nvs_host_function_in_graph(nvs_current_gpu(), params->fn, params->userData) : NULL;
    return made != NULL ? (CUDA_HOST_NODE_PARAMS){.fn = nvs_host_function_run, .userData = made} : *params;
}

static CUgraphNodeParams *with_ours(CUgraphNodeParams *params, CUgraphNodeParams *copy)
{
    if (params == NULL || params->type != CU_GRAPH_NODE_TYPE_HOST)
        return params;
    const CUDA_HOST_NODE_PARAMS made = ours(&(CUDA_HOST_NODE_PARAMS){.fn = params->host.fn, .userData = params->host.userData});
    *copy = *params;
    copy->host.fn = made.fn;
    copy->host.userData = made.userData;
    return copy;
}

/* `of`: the memory that the edit names. */
#define NVS_EDIT_AFTER(before, symbol, parameters, arguments, of)                                                       \
    static CUresult edit_##symbol parameters                                                                            \
    {                                                                                                                   \
        if (NVS_LIKELY(!nvs_operands_matter()))                                                                                   \
            return NVS_REAL(symbol) arguments;                                                                          \
        named what = of;                                                                                                \
        const uint32_t gpu = gate_for(&what);                                                                           \
        if (what.beyond)                                                                                                \
            return CUDA_ERROR_INVALID_VALUE;                                                                            \
        nvs_slot *const slot = nvs_gate_enter(gpu);                                                                     \
        const CUresult result = NVS_REAL(symbol) arguments;                                                             \
        nvs_gate_leave(slot, gpu);                                                                                      \
        return result;                                                                                                  \
    }                                                                                                                   \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                                                       \
    {                                                                                                                   \
        before;                                                                                                         \
        const CUresult result = edit_##symbol arguments;                                                                \
        NVS_MAY_ALLOCATE();                                                                                             \
        return hGraph != NULL && NVS_UNLIKELY(nvs_only_gpu() == NVS_NO_GPU) ? added(result, of) : result;               \
    }
#define NVS_EDIT(symbol, parameters, arguments, of) NVS_EDIT_AFTER(, symbol, parameters, arguments, of)
#define NVS_EDIT_ANY(symbol, parameters, arguments) \
    NVS_EDIT_AFTER(CUgraphNodeParams host; nodeParams = with_ours(nodeParams, &host), symbol, parameters, arguments, of_params(nodeParams))
#define OF_COPY(where, parameters) ((named){.context = (where), .copy = (parameters)})
#define OF_FILL(where, parameters) ((named){.context = (where), .fill = target_of(parameters)})

NVS_EDIT(cuGraphAddMemcpyNode,
         (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
          const CUDA_MEMCPY3D *copyParams, CUcontext ctx),
         (phGraphNode, hGraph, dependencies, numDependencies, copyParams, ctx), OF_COPY(ctx, copyParams))
NVS_EDIT(cuGraphAddMemsetNode,
         (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
          const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx),
         (phGraphNode, hGraph, dependencies, numDependencies, memsetParams, ctx), OF_FILL(ctx, memsetParams))
NVS_EDIT(cuGraphAddBatchMemOpNode,
         (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
          const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams),
         (phGraphNode, hGraph, dependencies, numDependencies, nodeParams), of_values(nodeParams))
NVS_EDIT_ANY(cuGraphAddNode,
         (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies, CUgraphNodeParams *nodeParams),
         (phGraphNode, hGraph, dependencies, numDependencies, nodeParams))
NVS_EDIT_ANY(cuGraphAddNode_v2,
         (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
          size_t numDependencies, CUgraphNodeParams *nodeParams),
         (phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams))
NVS_EDIT(cuGraphMemcpyNodeSetParams, (CUgraphNode hNode, const CUDA_MEMCPY3D *nodeParams), (hNode, nodeParams), OF_COPY(NULL, nodeParams))
NVS_EDIT(cuGraphMemsetNodeSetParams, (CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *nodeParams), (hNode, nodeParams),
         OF_FILL(NULL, nodeParams))
NVS_EDIT(cuGraphBatchMemOpNodeSetParams, (CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams), (hNode, nodeParams),
         of_values(nodeParams))
NVS_EDIT_ANY(cuGraphNodeSetParams, (CUgraphNode hNode, CUgraphNodeParams *nodeParams), (hNode, nodeParams))
NVS_EDIT(cuGraphExecMemcpyNodeSetParams, (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMCPY3D *copyParams, CUcontext ctx),
         (hGraphExec, hNode, copyParams, ctx), OF_COPY(ctx, copyParams))
NVS_EDIT(cuGraphExecMemsetNodeSetParams,
         (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_MEMSET_NODE_PARAMS *memsetParams, CUcontext ctx),
         (hGraphExec, hNode, memsetParams, ctx), OF_FILL(ctx, memsetParams))
NVS_EDIT(cuGraphExecBatchMemOpNodeSetParams,
         (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_BATCH_MEM_OP_NODE_PARAMS *nodeParams), (hGraphExec, hNode, nodeParams),
         of_values(nodeParams))
NVS_EDIT_ANY(cuGraphExecNodeSetParams, (CUgraphExec hGraphExec, CUgraphNode hNode, CUgraphNodeParams *nodeParams),
         (hGraphExec, hNode, nodeParams))
#if CUDA_VERSION >= 13040
NVS_EDIT_ANY(cuGraphAddNode_v3,
         (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, const CUgraphEdgeData *dependencyData,
          size_t numDependencies, CUgraphNodeParams *nodeParams),
         (phGraphNode, hGraph, dependencies, dependencyData, numDependencies, nodeParams))
NVS_EDIT_ANY(cuGraphNodeSetParams_v2, (CUgraphNode hNode, CUgraphNodeParams *nodeParams), (hNode, nodeParams))
#endif

/* The driver compares the memory of old and new nodes, which the call does not name.  So an update needs the leases that a launch needs. */
#define NVS_UPDATE(symbol, parameters, arguments)                              \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                              \
    {                                                                          \
        const uint32_t gpu = nvs_swapping() ? nvs_current_gpu() : NVS_NO_GPU;  \
        nvs_slot *const slot = nvs_gate_enter(gpu);                         \
        const CUresult result = NVS_REAL(symbol) arguments;                    \
        nvs_gate_leave(slot, gpu);                                             \
        return result;                                                         \
    }

NVS_UPDATE(cuGraphExecUpdate,
           (CUgraphExec hGraphExec, CUgraph hGraph, CUgraphNode *hErrorNode_out, CUgraphExecUpdateResult *updateResult_out),
           (hGraphExec, hGraph, hErrorNode_out, updateResult_out))
NVS_UPDATE(cuGraphExecUpdate_v2, (CUgraphExec hGraphExec, CUgraph hGraph, CUgraphExecUpdateResultInfo *resultInfo),
           (hGraphExec, hGraph, resultInfo))
NVS_UPDATE(cuGraphExecChildGraphNodeSetParams, (CUgraphExec hGraphExec, CUgraphNode hNode, CUgraph childGraph),
           (hGraphExec, hNode, childGraph))

/* ---- Kernels ---- */

NVS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                 size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS_v1 *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphAddKernelNode)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    node_added(result, NULL);
    return result;
}

/* The context belongs to `kern`; the driver ignores it beside a function. */
NVS_EXPORT CUresult CUDAAPI cuGraphAddKernelNode_v2(CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies,
                                                    size_t numDependencies, const CUDA_KERNEL_NODE_PARAMS *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphAddKernelNode_v2)(phGraphNode, hGraph, dependencies, numDependencies, nodeParams);
    node_added(result, result == CUDA_SUCCESS && nodeParams->func == NULL ? nodeParams->ctx : NULL);
    return result;
}

/* ---- Host functions: queries return the application's own ---- */

static void restore(CUhostFn *function, void **data)
{
    const nvs_host_function *const made = *data;
    if (*function != nvs_host_function_run)
        return;
    *function = made->function;
    *data = made->data;
}

#define NVS_NAMES_HOST(symbol, parameters, arguments)                                 \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                     \
    {                                                                                 \
        CUDA_HOST_NODE_PARAMS made;                                                   \
        if (nodeParams != NULL) {                                                     \
            made = ours(nodeParams);                                                  \
            nodeParams = &made;                                                       \
        }                                                                             \
        return NVS_REAL(symbol) arguments;                                            \
    }

NVS_NAMES_HOST(cuGraphAddHostNode,
               (CUgraphNode *phGraphNode, CUgraph hGraph, const CUgraphNode *dependencies, size_t numDependencies,
                const CUDA_HOST_NODE_PARAMS *nodeParams),
               (phGraphNode, hGraph, dependencies, numDependencies, nodeParams))
NVS_NAMES_HOST(cuGraphHostNodeSetParams, (CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams), (hNode, nodeParams))
NVS_NAMES_HOST(cuGraphExecHostNodeSetParams, (CUgraphExec hGraphExec, CUgraphNode hNode, const CUDA_HOST_NODE_PARAMS *nodeParams),
               (hGraphExec, hNode, nodeParams))

NVS_EXPORT CUresult CUDAAPI cuGraphHostNodeGetParams(CUgraphNode hNode, CUDA_HOST_NODE_PARAMS *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphHostNodeGetParams)(hNode, nodeParams);
    if (result == CUDA_SUCCESS)
        restore(&nodeParams->fn, &nodeParams->userData);
    return result;
}

#if CUDA_VERSION >= 13020
NVS_EXPORT CUresult CUDAAPI cuGraphNodeGetParams(CUgraphNode hNode, CUgraphNodeParams *nodeParams)
{
    const CUresult result = NVS_REAL(cuGraphNodeGetParams)(hNode, nodeParams);
    if (result == CUDA_SUCCESS && nodeParams->type == CU_GRAPH_NODE_TYPE_HOST)
        restore(&nodeParams->host.fn, &nodeParams->host.userData);
    return result;
}
#endif

/* ---- Memory that graphs allocate ---- */

NVS_EXPORT CUresult CUDAAPI cuGraphExecDestroy(CUgraphExec hGraphExec)
{
    nvs_allocation *const held = nvs_graph_memory_take(hGraphExec);
    const CUresult result = NVS_REAL(cuGraphExecDestroy)(hGraphExec);
    nvs_graph_memory_keep(result == CUDA_SUCCESS ? NULL : hGraphExec, held);
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

/* Inside the gate, since the driver may copy data of the graph to the GPU.  Charged before the gate, since the charge may wait for other programs. */
#define NVS_INSTANTIATE(symbol, parameters, arguments)                     \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                          \
    {                                                                      \
        nvs_allocation *held;                                              \
        CUresult result = nvs_graph_memory_admit(hGraph, &held);           \
        if (result != CUDA_SUCCESS)                                        \
            return result;                                                 \
        const uint32_t gpu = nvs_current_gpu();                            \
        nvs_slot *const slot = nvs_gate_enter(gpu);                     \
        result = NVS_REAL(symbol) arguments;                               \
        nvs_gate_leave(slot, gpu);                                         \
        nvs_graph_memory_keep(result == CUDA_SUCCESS ? *phGraphExec : NULL, held); \
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
