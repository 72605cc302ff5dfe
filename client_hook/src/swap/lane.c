/* The streams and events of a GPU's moves, made before memory fills the card and kept from one move to the next, because the driver makes
 * no stream on a full card (measured on a driver 580).
 *
 * They belong to a context.  A thread that ends the context destroys them first, or the driver destroys them with it.
 */
#include "swap/swap.h"

#include <string.h>

#include "contexts/context.h"
#include "driver/cuda_api.h"

NVS_FORK_STATE static nvs_lane lanes[NVS_MAX_GPUS]; /* used by the GPU's mover; `context` is under the lock of swap.h, as other threads report its end */

static void destroy_lane(nvs_lane *with)
{
    for (unsigned i = 0; i < NVS_LANE_STREAMS; i++)
        if (with->streams[i] != NULL)
            NVS_REAL(cuStreamDestroy_v2)(with->streams[i]);
    for (unsigned i = 0; i < NVS_LANE_EVENTS; i++)
        if (with->events[i] != NULL)
            NVS_REAL(cuEventDestroy_v2)(with->events[i]);
    *with = (nvs_lane){0};
}

static CUresult make_lane(CUcontext context, nvs_lane *out)
{
    nvs_lane made = {.context = context};
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < NVS_LANE_STREAMS && result == CUDA_SUCCESS; i++)
        result = NVS_REAL(cuStreamCreate)(&made.streams[i], CU_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < NVS_LANE_EVENTS && result == CUDA_SUCCESS; i++)
        result = NVS_REAL(cuEventCreate)(&made.events[i], CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (result != CUDA_SUCCESS)
        destroy_lane(&made);
    *out = made;
    return result;
}

/* Destroys the old lane while a visit holds its context; without a visit the lane ends with the context. */
static void replace_lane(nvs_lane *with, const nvs_lane *made)
{
    nvs_swap_lock();
    const CUcontext before = with->context;
    nvs_swap_unlock();
    const size_t visit = nvs_context_hold(before);
    nvs_swap_lock();
    nvs_lane old = *with; /* empty if the thread that ends its context has taken it */
    *with = *made;
    nvs_swap_unlock();
    if (old.context != NULL && visit != 0)
        destroy_lane(&old);
    nvs_context_unhold(visit);
}

CUresult nvs_swap_lane(uint32_t gpu, CUcontext context, nvs_lane **out)
{
    nvs_lane *const with = &lanes[gpu];
    *out = with;
    nvs_swap_lock();
    bool there = with->context == context;
    nvs_swap_unlock();
    if (there)
        return CUDA_SUCCESS;
    nvs_lane made;
    const CUresult result = make_lane(context, &made);
    if (result == CUDA_SUCCESS)
        replace_lane(with, &made);
    return result;
}

/* Visit of nvs_each_context. */
static bool make_first(CUcontext context, void *argument)
{
    nvs_lane *const with = argument;
    CUcontext ignored;
    nvs_lane made;
    if (!nvs_context_enter(context))
        return true;
    if (make_lane(context, &made) == CUDA_SUCCESS) {
        nvs_swap_lock();
        const bool late = with->context != NULL; /* another thread's, which the mover may use by now */
        if (!late)
            *with = made;
        nvs_swap_unlock();
        if (late)
            destroy_lane(&made);
    }
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

void nvs_swap_lane_ahead(uint32_t gpu)
{
    nvs_swap_lock();
    const bool there = lanes[gpu].context != NULL;
    nvs_swap_unlock();
    if (there)
        return;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the application's captures are not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    nvs_each_context(gpu, make_first, &lanes[gpu]);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

static nvs_lane take_lane_of(CUcontext context, uint32_t gpu)
{
    nvs_lane taken = {0};
    nvs_swap_lock();
    if (lanes[gpu].context == context) {
        taken = lanes[gpu];
        lanes[gpu] = (nvs_lane){0};
    }
    nvs_swap_unlock();
    return taken;
}

void nvs_swap_lanes_context_gone(CUcontext context)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        (void)take_lane_of(context, gpu); /* its streams and events ended with it */
}

void nvs_swap_lanes_context_leaving(CUcontext context)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_lane old = take_lane_of(context, gpu);
        if (old.context != NULL && nvs_context_enter(context)) {
            destroy_lane(&old);
            NVS_REAL(cuCtxPopCurrent_v2)(&context);
        }
    }
}

NVS_FORK_CODE void nvs_swap_lanes_after_fork(void)
{
    static const nvs_lane none;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (memcmp(&lanes[gpu], &none, sizeof none) != 0)
            lanes[gpu] = none;
}
