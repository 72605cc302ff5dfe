/* Wrappers of everything that puts work on a GPU, or waits for it: bodies made from cuda_api.def, and those that fit no mould.
 *
 * Rule: enter the gate, call the real function of the same name, leave; nothing else on this path.
 */
#include "context.h"
#include "cuda_api.h"
#include "gate.h"
#include "pacing.h"

/* One graph may stand for many kernels.  A constant, as the name is one. */
#define NVS_HEAVY(name) (__builtin_strncmp(name, "cuGraphLaunch", sizeof "cuGraphLaunch" - 1) == 0)

/* What pacing tells kinds of work by.  A wrapper's parameters have cuda.h's names, which hide these where they exist. */
static const CUfunction f = NULL;
static const CUgraphExec hGraph = NULL, hGraphExec = NULL;
static const unsigned int gridDimX = 0, gridDimY = 1, gridDimZ = 1;
static const size_t ByteCount = 0, N = 0, Width = 0, Height = 1;
#define NVS_WHAT(symbol)                                                                                     \
    nvs_pace_what(NVS_ID_##symbol, f != NULL ? (const void *)f : hGraph != NULL ? (const void *)hGraph : hGraphExec, \
                  (uint64_t)gridDimX * gridDimY * gridDimZ + ByteCount + N + (uint64_t)Width * Height)

#define NVS_GATED(symbol, parameters, arguments, gpu_of_call, work_stream)         \
    NVS_EXPORT __attribute__((flatten)) CUresult CUDAAPI symbol parameters          \
    {                                                                              \
        const uint32_t gpu = (gpu_of_call);                                        \
        nvs_slot *const slot = nvs_gate_enter(gpu);                                \
        const CUresult result = NVS_REAL(symbol) arguments;                        \
        if (NVS_HEAVY(#symbol) ? nvs_gate_leave_heavy(slot, gpu) : nvs_gate_leave(slot, gpu)) \
            nvs_pace_after(gpu, (work_stream), NVS_PER_THREAD(#symbol), NVS_WHAT(symbol)); \
        return result;                                                             \
    }

#define NVS_STREAM(symbol, since, parameters, arguments, stream_expression)                               \
    NVS_GATED(symbol, parameters, arguments, nvs_stream_gpu(stream_expression), stream_expression)
#define NVS_CURRENT(symbol, since, parameters, arguments)                                                 \
    NVS_GATED(symbol, parameters, arguments, nvs_current_gpu(), NULL)
#define NVS_UNSTREAMED(symbol, since, parameters, arguments)                               \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                         \
    {                                                                                     \
        const uint32_t gpu = nvs_current_gpu();                                           \
        nvs_slot *const slot = nvs_gate_enter(gpu);                                       \
        const CUresult result = NVS_REAL(symbol) arguments;                               \
        nvs_gate_leave(slot, gpu);                                                        \
        return result;                                                                    \
    }
#define NVS_CUSTOM(symbol, since)
#define NVS_PASS(symbol, since, reason)
#define NVS_THUNK(symbol, since, reason)
#define NVS_FOREIGN(symbol, since, reason)
#include "cuda_api.def"

/* One launch on several GPUs.  A thread can stand in one gate only: it passes the others' first, so that it holds their
 * lease when it comes to the launch, unless one is revoked just then; NVIDIA removed the function in CUDA 13. */
NVS_EXPORT CUresult CUDAAPI cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launchParamsList, unsigned int numDevices,
                                                                 unsigned int flags)
{
    uint32_t gpu = NVS_NO_GPU;
    if (launchParamsList != NULL && numDevices > 0) {
        for (unsigned int i = 1; i < numDevices; i++) {
            gpu = nvs_stream_gpu(launchParamsList[i].hStream);
            nvs_gate_leave(nvs_gate_enter(gpu), gpu);
        }
        gpu = nvs_stream_gpu(launchParamsList[0].hStream);
    }
    nvs_slot *const slot = nvs_gate_enter(gpu);
    const CUresult result = NVS_REAL(cuLaunchCooperativeKernelMultiDevice)(launchParamsList, numDevices, flags);
    if (nvs_gate_leave(slot, gpu))
        nvs_pace_after(gpu, launchParamsList[0].hStream, false,
                       nvs_pace_what(NVS_ID_cuLaunchCooperativeKernelMultiDevice, launchParamsList[0].function, 0));
    return result;
}

/* These submit nothing and pass no gate.  The agent must not take a program for idle that waits for its work, and pacing has
 * to know that the thread has waited by itself. */
#define NVS_WAITS(symbol, parameters, arguments, gpu_of_call)    \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                \
    {                                                            \
        nvs_slot *const slot = nvs_gate_await(gpu_of_call);      \
        const CUresult result = NVS_REAL(symbol) arguments;      \
        nvs_gate_awaited(slot);                                  \
        nvs_pace_synchronized();                                 \
        return result;                                           \
    }

NVS_WAITS(cuCtxSynchronize, (void), (), nvs_current_gpu())
NVS_WAITS(cuCtxSynchronize_v2, (CUcontext ctx), (ctx), nvs_context_gpu(ctx))
NVS_WAITS(cuEventSynchronize, (CUevent hEvent), (hEvent), nvs_current_gpu())
NVS_WAITS(cuStreamSynchronize, (CUstream hStream), (hStream), nvs_stream_gpu(hStream))
NVS_WAITS(cuStreamSynchronize_ptsz, (CUstream hStream), (hStream), nvs_stream_gpu(hStream))
