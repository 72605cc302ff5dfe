/* Dead contexts: those with a sticky error.
 *
 * After such an error (an illegal address, a trap) the driver answers each call in the context with it, runs none of its work and opens no other
 * context on the GPU for this process, not even after a reset.  Physical memory can still be unmapped and released.  So the hook discards the program's
 * memory instead of moving it (swap/move.c), and its calls pass the closed gate (gate/gate.h): each gets the driver's error at once, without a lease.
 * This applies when all contexts of the GPU are dead, since memory and calls may belong to any of them.
 */
#include "contexts/dead.h"

#include "base/log.h"
#include "base/port.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"

static bool is_sticky(CUresult result)
{
    switch ((int)result) {
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case 226: /* CUDA_ERROR_CONTAINED; as the next number, missing in an older cuda.h */
    case 721: /* CUDA_ERROR_TENSOR_MEMORY_LEAK */
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_MPS_RPC_FAILURE: /* the server is gone */
    case CUDA_ERROR_MPS_CLIENT_TERMINATED: /* by the server, after a fault of another client */
        return true;
    default: return false;
    }
}

CUresult nvs_context_error(void)
{
    CUevent event;
    const CUresult result = NVS_REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS)
        (void)NVS_REAL(cuEventDestroy_v2)(event);
    return is_sticky(result) ? result : CUDA_SUCCESS;
}

typedef struct contexts_state {
    CUresult error;
    bool alive;
} contexts_state;

static bool ask(CUcontext context, void *argument)
{
    contexts_state *found = argument;
    CUcontext popped;
    if (!nvs_context_enter(context))
        return true;
    const CUresult error = nvs_context_error();
    (void)NVS_REAL(cuCtxPopCurrent_v2)(&popped);
    if (error == CUDA_SUCCESS)
        found->alive = true;
    else
        found->error = error;
    return !found->alive;
}

bool nvs_gpu_check_dead(uint32_t gpu)
{
    contexts_state found = {0};
    if (nvs_gate_dead(gpu))
        return true;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* does not invalidate the application's captures */
    (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    const bool all = nvs_each_context(gpu, ask, &found);
    (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (!all || found.alive || found.error == CUDA_SUCCESS)
        return false;
    NVS_LOG_ONCE(NVS_LOG_WARNING, "all contexts of this program on GPU %u have the CUDA error %d until the program ends: its memory there no longer "
                                  "moves", gpu, (int)found.error);
    nvs_gate_set_dead(gpu, true);
    nvs_coordinator.memory_changed(gpu);
    return true;
}
