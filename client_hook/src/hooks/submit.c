/* Wrappers of functions that put work on a GPU, or wait for it: bodies made from driver/cuda_api.def, and written ones.
 *
 * A wrapper enters the gate, calls the real function, and leaves.  The fast path does nothing else: the process sees one GPU and has no capture
 * open (inflight/captures.h).
 */
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "gate/host_functions.h"
#include "hooks/graph.h"
#include "hooks/operands.h"
#include "inflight/captures.h"
#include "inflight/pacing.h"
#include "memory/memory.h"
#include "memory/pools.h"

#include <stdlib.h>

/* A compile-time constant. */
#define NVS_IS_GRAPH(name) (__builtin_strncmp(name, "cuGraphLaunch", sizeof "cuGraphLaunch" - 1) == 0)

/* The kind of work, for pacing.  A wrapper's parameters have the names of cuda.h, and hide these constants. */
static const CUfunction f = NULL;
static const CUgraphExec hGraph = NULL;
static const unsigned int gridDimX = 0, gridDimY = 1, gridDimZ = 1;
static const size_t ByteCount = 0, N = 0, Width = 0, Height = 1;
#define NVS_WHAT(symbol)                                                                                     \
    nvs_pace_what(NVS_ID_##symbol, f != NULL ? (const void *)f : hGraph,                                     \
                  (uint64_t)gridDimX * gridDimY * gridDimZ + ByteCount + N + (uint64_t)Width * Height)

/* Addresses in the call that may be memory of another GPU (hooks/operands.h); parameters hide them in the same way. */
static const CUdeviceptr dst = 0, src = 0, dstDevice = 0, srcDevice = 0, addr = 0;
static const CUdeviceptr *const dsts = NULL, *const srcs = NULL;
static const size_t count = 0, numOps = 0, size = 0, dstPitch = 0;
static const size_t *const sizes = NULL;
static const struct { char absent[16]; } uc, us, ui; /* the value of a fill; larger than each */
#define NVS_ELEMENT (sizeof uc < sizeof(void *) ? sizeof uc : sizeof us < sizeof(void *) ? sizeof us : sizeof ui < sizeof(void *) ? sizeof ui : 1)
#define NVS_NAMED_BYTES                                                                                  \
    (ByteCount + size + N * NVS_ELEMENT + (addr != 0 ? sizeof(cuuint32_t) : 0) +                         \
     (Width != 0 && Height != 0 ? Width * NVS_ELEMENT + (Height - 1) * dstPitch : 0))
static const void *const pCopy = NULL, *const opList = NULL, *const op = NULL, *const paramArray = NULL;
static unsigned no_operands(uint32_t gpu, const void *shape) { return 0; }
static unsigned no_operand_list(uint32_t gpu, const void *list, size_t length) { return 0; }
#define NVS_NAMES_MEMORY                                                                                                   \
    (dst + src + dstDevice + srcDevice + addr != 0 || dsts != NULL || pCopy != NULL || opList != NULL || op != NULL || paramArray != NULL)
static unsigned prepare_shape(uint32_t gpu, const CUDA_MEMCPY3D_BATCH_OP *shape) { return nvs_operands_prepare_shapes(gpu, shape, 1); }

/* The NVS_OPERANDS_ bits of a call (hooks/operands.h).  None in a process whose memory never moves. */
#define NVS_PREPARE_OPERANDS(gpu, found)                                                                                    \
    do {                                                                                                        \
        if (NVS_NAMES_MEMORY && /* a constant in most calls */                                                   \
            NVS_UNLIKELY(nvs_only_gpu() == NVS_NO_GPU || nvs_swapping()) && \
            (gpu) != NVS_NO_GPU && nvs_operands_matter()) {                                                               \
            if (dst + src + dstDevice + srcDevice + addr != 0) /* a call has one pair or the other */           \
                found |= nvs_operands_prepare(gpu, (nvs_operand){dst + dstDevice + addr, NVS_NAMED_BYTES},     \
                                              (nvs_operand){src + srcDevice, NVS_NAMED_BYTES});                  \
            if (dsts != NULL)                                                                                   \
                found |= nvs_operands_prepare_list(gpu, dsts, srcs, sizes, count);                                                 \
            found |= _Generic((pCopy), const CUDA_MEMCPY2D *: nvs_operands_prepare_2d, const CUDA_MEMCPY3D *: nvs_operands_prepare_3d,  \
                              const CUDA_MEMCPY3D_PEER *: nvs_operands_prepare_peer, default: no_operands)(gpu, pCopy);    \
            found |= _Generic((opList), CUDA_MEMCPY3D_BATCH_OP *: nvs_operands_prepare_shapes, default: no_operand_list)(gpu, opList, numOps); \
            found |= _Generic((op), CUDA_MEMCPY3D_BATCH_OP *: prepare_shape, default: no_operands)(gpu, op);        \
            found |= _Generic((paramArray), CUstreamBatchMemOpParams *: nvs_operands_prepare_values, default: no_operand_list)(gpu, paramArray, count); \
        }                                                                                                       \
    } while (0)

#define NVS_PEER_COPY(symbol, work_stream, no_stream, result)                                                   \
    nvs_peer_copy_try(&(nvs_peer_copy){.stream = NVS_HANDLE(symbol, work_stream), .waits = (no_stream), \
                                       .to = dst + dstDevice, .from = src + srcDevice, .bytes = ByteCount + size}, result)

/* Most calls take the fast path (gate/gate.h).  It is kept small for the instruction cache. */
#define NVS_GATED(symbol, parameters, arguments, gpu_of_call, work_stream, no_stream) \
    static __attribute__((noinline, flatten)) CUresult slow_##symbol parameters    \
    {                                                                              \
        const uint32_t gpu = (gpu_of_call);                                        \
        CUresult result;                                                           \
        unsigned found = 0;                                                        \
        NVS_PREPARE_OPERANDS(gpu, found);                                                      \
        if (NVS_UNLIKELY((found & NVS_OPERANDS_BEYOND) != 0))                      \
            return CUDA_ERROR_INVALID_VALUE;                                       \
        bool stopped = false;                                                      \
        if (NVS_IS_GRAPH(#symbol) && nvs_graphs_share_gpus() && gpu < NVS_MAX_GPUS) \
            nvs_graphs_run_on(1u << gpu);                                          \
        nvs_slot *const slot = nvs_gate_enter_stoppable(gpu, &stopped);            \
        if (NVS_UNLIKELY(stopped))                                                 \
            return NVS_STOPPED_RESULT;                                             \
        const nvs_peer_copy_outcome peer = NVS_LIKELY((found & NVS_OPERANDS_UNREACHABLE) == 0) ? NVS_COPY_DRIVER_ANSWERS : NVS_PEER_COPY(symbol, work_stream, no_stream, &result); \
        if (peer != NVS_COPY_HANDLED)                                              \
            result = NVS_REAL(symbol) arguments;                                   \
        if (peer == NVS_COPY_CONTEXT_PUSHED)                                       \
            nvs_peer_copy_pop();                                                   \
        if (NVS_IS_GRAPH(#symbol) && nvs_graphs_share_gpus() && result == CUDA_SUCCESS) \
            nvs_graph_mark(gpu, NVS_HANDLE(symbol, work_stream));                  \
        nvs_capture_submitted(gpu, NVS_HANDLE(symbol, work_stream), result);       \
        if (NVS_IS_GRAPH(#symbol) ? nvs_gate_leave_graph(slot, gpu, hGraph) : nvs_gate_leave(slot, gpu)) \
            nvs_pace_after(gpu, NVS_HANDLE(symbol, work_stream), NVS_WHAT(symbol)); \
        return result;                                                              \
    }                                                                               \
    NVS_EXPORT __attribute__((aligned(64))) CUresult CUDAAPI symbol parameters      \
    {                                                                               \
        nvs_slot *slot;                                                             \
        const nvs_function real = nvs_real_known(NVS_ID_##symbol); /* no call before the driver's: no register is saved */ \
        if (NVS_UNLIKELY(real == NULL) || (NVS_NAMES_MEMORY && NVS_UNLIKELY(nvs_swapping())) || \
            NVS_UNLIKELY((slot = nvs_gate_enter_fast(NVS_IS_GRAPH(#symbol) ? hGraph : NULL)) == NULL)) \
            return slow_##symbol arguments;                                          \
        const CUresult result = ((__typeof__(&symbol))real) arguments;              \
        nvs_capture_submitted(0, NVS_HANDLE(symbol, work_stream), result);          \
        if (NVS_UNLIKELY(nvs_gate_leave_fast(slot, 0)))                                   \
            pace_alone(slot, NVS_HANDLE(symbol, work_stream));                      \
        return result;                                                              \
    }

/* Rarely called.  Pacing of a program that is alone on its GPU counts submissions of all kinds alike. */
static __attribute__((noinline)) void pace_alone(nvs_slot *slot, CUstream stream)
{
    if (nvs_gate_leave_slow(slot, 0))
        nvs_pace_after(0, stream, 0);
}

#define NVS_STREAM(symbol, since, parameters, arguments, stream_expression)                               \
    NVS_GATED(symbol, parameters, arguments, nvs_stream_gpu(stream_expression), stream_expression, false)
#define NVS_CURRENT(symbol, since, parameters, arguments)                                                 \
    NVS_GATED(symbol, parameters, arguments, nvs_current_gpu(), NULL, true)
#define NVS_UNSTREAMED(symbol, since, parameters, arguments)                               \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                         \
    {                                                                                     \
        const uint32_t gpu = nvs_current_gpu();                                           \
        bool stopped = false;                                                             \
        nvs_slot *const slot = nvs_gate_enter_stoppable(gpu, &stopped);                   \
        if (NVS_UNLIKELY(stopped))                                                        \
            return NVS_STOPPED_RESULT;                                                    \
        const CUresult result = NVS_REAL(symbol) arguments;                               \
        nvs_gate_leave(slot, gpu);                                                        \
        return result;                                                                    \
    }
#define NVS_CUSTOM(symbol, since)
#define NVS_PASS(symbol, since, reason)
#define NVS_THUNK(symbol, since, reason)
#define NVS_FOREIGN(symbol, since, reason)
#include "driver/cuda_api.def"

/* ---- Host functions: the driver gets a function of ours (gate/host_functions.h) ---- */

/* A captured function becomes a node of a graph, and runs at each launch. */
static nvs_host_function *queued(uint32_t gpu, CUstream stream, CUhostFn function, CUstreamCallback callback, void *data)
{
    nvs_captures_mark_threads();
    if (function != NULL && nvs_capturing() && nvs_stream_captures(stream))
        return nvs_host_function_in_graph(gpu, function, data);
    nvs_host_function what = {.function = function, .callback = callback, .data = data, .gpu = gpu, .stream = stream};
    unsigned flags = CU_STREAM_NON_BLOCKING;
    if (NVS_REAL(cuStreamGetCtx)(stream, &what.context) != CUDA_SUCCESS)
        (void)NVS_REAL(cuCtxGetCurrent)(&what.context);
    (void)NVS_REAL(cuStreamGetFlags)(stream, &flags);
    what.blocking = (flags & CU_STREAM_NON_BLOCKING) == 0;
    return nvs_host_function_queued(&what);
}

#define NVS_QUEUES(symbol, parameters, function, callback, given, ours, arguments) \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                                 \
    {                                                                             \
        const uint32_t gpu = nvs_stream_gpu(hStream);                             \
        bool stopped = false;                                                     \
        nvs_slot *const slot = nvs_gate_enter_stoppable(gpu, &stopped);           \
        if (NVS_UNLIKELY(stopped))                                                \
            return NVS_STOPPED_RESULT;                                            \
        nvs_host_function *const made = queued(gpu, NVS_HANDLE(symbol, hStream), function, callback, userData); \
        if (made != NULL) {                                                       \
            given = ours;                                                         \
            userData = made;                                                      \
        }                                                                         \
        const CUresult result = NVS_REAL(symbol) arguments;                       \
        if (result != CUDA_SUCCESS && made != NULL && made->stream != NULL)       \
            free(made);                                                           \
        nvs_capture_submitted(gpu, NVS_HANDLE(symbol, hStream), result);          \
        nvs_gate_leave(slot, gpu);                                                \
        return result;                                                            \
    }

#define NVS_QUEUES_FUNCTION(symbol) \
    NVS_QUEUES(symbol, (CUstream hStream, CUhostFn fn, void *userData), fn, NULL, fn, nvs_host_function_run, (hStream, fn, userData))
#define NVS_QUEUES_FUNCTION_V2(symbol)                                                                                              \
    NVS_QUEUES(symbol, (CUstream hStream, CUhostFn fn, void *userData, unsigned int syncMode), fn, NULL, fn, nvs_host_function_run, \
               (hStream, fn, userData, syncMode))
#define NVS_QUEUES_CALLBACK(symbol)                                                                                                 \
    NVS_QUEUES(symbol, (CUstream hStream, CUstreamCallback callback, void *userData, unsigned int flags), NULL, callback, callback, \
               nvs_host_function_run_callback, (hStream, callback, userData, flags))

NVS_QUEUES_FUNCTION(cuLaunchHostFunc)
NVS_QUEUES_FUNCTION(cuLaunchHostFunc_ptsz)
NVS_QUEUES_CALLBACK(cuStreamAddCallback)
NVS_QUEUES_CALLBACK(cuStreamAddCallback_ptsz)
#if CUDA_VERSION >= 13020
NVS_QUEUES_FUNCTION_V2(cuLaunchHostFunc_v2)
NVS_QUEUES_FUNCTION_V2(cuLaunchHostFunc_v2_ptsz)
#endif

/* ---- Waits ---- */

/* These submit nothing and pass no gate.  They tell the agent that the program is not idle, and pacing that the thread has synchronised. */
#define NVS_WAITS(symbol, parameters, arguments, gpu_of_call)    \
    NVS_EXPORT CUresult CUDAAPI symbol parameters                \
    {                                                            \
        nvs_slot *const slot = nvs_gate_await(gpu_of_call);      \
        const CUresult result = NVS_REAL(symbol) arguments;      \
        nvs_gate_awaited(slot);                                  \
        nvs_pace_synchronized();                                 \
        nvs_pools_synchronized();                                \
        return result;                                           \
    }

#define NVS_ASKS(symbol, parameters, arguments)              \
    NVS_EXPORT CUresult CUDAAPI symbol parameters            \
    {                                                        \
        nvs_slot *const slot = nvs_query_enter();            \
        const CUresult result = NVS_REAL(symbol) arguments;  \
        nvs_gate_awaited(slot);                              \
        return result;                                       \
    }

NVS_ASKS(cuEventElapsedTime, (float *pMilliseconds, CUevent hStart, CUevent hEnd), (pMilliseconds, hStart, hEnd))
NVS_ASKS(cuEventElapsedTime_v2, (float *pMilliseconds, CUevent hStart, CUevent hEnd), (pMilliseconds, hStart, hEnd))
NVS_ASKS(cuEventQuery, (CUevent hEvent), (hEvent))
NVS_ASKS(cuStreamQuery, (CUstream hStream), (hStream))
NVS_ASKS(cuStreamQuery_ptsz, (CUstream hStream), (hStream))

NVS_WAITS(cuCtxSynchronize, (void), (), nvs_current_gpu())
NVS_WAITS(cuCtxSynchronize_v2, (CUcontext ctx), (ctx), nvs_only_gpu() != NVS_NO_GPU ? nvs_only_gpu() : nvs_context_gpu(ctx))
NVS_WAITS(cuEventSynchronize, (CUevent hEvent), (hEvent), nvs_current_gpu())
NVS_WAITS(cuStreamSynchronize, (CUstream hStream), (hStream), nvs_stream_gpu(hStream))
NVS_WAITS(cuStreamSynchronize_ptsz, (CUstream hStream), (hStream), nvs_stream_gpu(hStream))
