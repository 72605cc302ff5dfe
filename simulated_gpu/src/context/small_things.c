/* Calls that runtimes and profilers make in passing, whose effect a simulated card does not have: they are accepted, with the
 * checks that the interface promises, and what is set can be read again where that costs nothing.
 */
#include "graph/graph.h"

#include <string.h>

static CUresult stream_of(CUstream handle)
{
    sim_stream *stream;
    return nvs_sim_stream(handle, &stream);
}

SIM_EXPORT CUresult CUDAAPI cuStreamGetAttribute(CUstream hStream, CUstreamAttrID attr, CUstreamAttrValue *value_out)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value_out != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(value_out, 0, sizeof *value_out);
    return nvs_sim_return(stream_of(hStream));
}

SIM_EXPORT CUresult CUDAAPI cuStreamSetAttribute(CUstream hStream, CUstreamAttrID attr, const CUstreamAttrValue *value)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_return(stream_of(hStream));
}

SIM_EXPORT CUresult CUDAAPI cuStreamCopyAttributes(CUstream dst, CUstream src)
{
    NVS_SIM_ENTER();
    NVS_SIM_TRY(stream_of(src));
    return nvs_sim_return(stream_of(dst));
}

static CUresult kernel_node(CUgraphNode handle)
{
    sim_node *node;
    CUresult result = nvs_sim_node_find(handle, &node);
    return result == CUDA_SUCCESS && node->type != CU_GRAPH_NODE_TYPE_KERNEL ? CUDA_ERROR_INVALID_VALUE : result;
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeGetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, CUkernelNodeAttrValue *value_out)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value_out != NULL, CUDA_ERROR_INVALID_VALUE);
    memset(value_out, 0, sizeof *value_out);
    return nvs_sim_return(kernel_node(hNode));
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeSetAttribute(CUgraphNode hNode, CUkernelNodeAttrID attr, const CUkernelNodeAttrValue *value)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_return(kernel_node(hNode));
}

SIM_EXPORT CUresult CUDAAPI cuGraphKernelNodeCopyAttributes(CUgraphNode dst, CUgraphNode src)
{
    NVS_SIM_ENTER();
    NVS_SIM_TRY(kernel_node(src));
    return nvs_sim_return(kernel_node(dst));
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetExecAffinitySupport(int *pi, CUexecAffinityType type, CUdevice dev)
{
    sim_device *device;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(pi != NULL, CUDA_ERROR_INVALID_VALUE);
    *pi = 0;
    return nvs_sim_return(nvs_sim_device(dev, &device));
}

SIM_EXPORT CUresult CUDAAPI cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope)
{
    NVS_SIM_ENTER_CONTEXT();
    return nvs_sim_return(nvs_sim_context_usable(context));
}

/* cudaProfiler.h, which declares these, is not in every wheel. */
SIM_EXPORT CUresult CUDAAPI cuProfilerStart(void);
SIM_EXPORT CUresult CUDAAPI cuProfilerStop(void);

SIM_EXPORT CUresult CUDAAPI cuProfilerStart(void)
{
    NVS_SIM_ENTER_CONTEXT();
    return nvs_sim_return(nvs_sim_context_usable(context));
}

SIM_EXPORT CUresult CUDAAPI cuProfilerStop(void)
{
    NVS_SIM_ENTER_CONTEXT();
    return nvs_sim_return(nvs_sim_context_usable(context));
}
