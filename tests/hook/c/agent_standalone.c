/* The agent's side of the hook without its interception, for programs that sanitizers can see whole: what the agent
 * needs of the other parts, as simply as can be, and gated versions of the calls that agent_client.c makes.  Atomics are counters
 * and flags that stand for themselves, hence relaxed.
 */
#define _GNU_SOURCE
#include "base/port.h"
#include "base/process/fork.h"
#include "contexts/context.h"
#include "contexts/gpu_facts.h"
#include "contexts/streams.h"
#include "coord/agent.h"
#include "coord/host.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "gate/start.h"
#include "host/pool.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "memory/memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

_Atomic(nvs_function) nvs_reals[NVS_ID_COUNT];

static const char *const names[NVS_ID_COUNT] = {
#define NVS_STREAM(symbol, since, parameters, arguments, stream) [NVS_ID_##symbol] = #symbol,
#define NVS_CURRENT(symbol, since, parameters, arguments) [NVS_ID_##symbol] = #symbol,
#define NVS_UNSTREAMED(symbol, since, parameters, arguments) [NVS_ID_##symbol] = #symbol,
#define NVS_CUSTOM(symbol, since) [NVS_ID_##symbol] = #symbol,
#define NVS_PASS(symbol, since, reason) [NVS_ID_##symbol] = #symbol,
#define NVS_THUNK(symbol, since, reason) [NVS_ID_##symbol] = #symbol,
#define NVS_FOREIGN(symbol, since, reason) [NVS_ID_##symbol] = #symbol,
#include "driver/cuda_api.def"
};

nvs_function nvs_real_resolve(nvs_id id)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *address = driver != NULL ? dlsym(driver, names[id]) : NULL;
    if (address == NULL) {
        fprintf(stderr, "no %s\n", names[id]);
        abort();
    }
    nvs_function function = nvs_as_function(address);
    atomic_store_explicit(&nvs_reals[id], function, memory_order_release); /* pairs with nvs_real */
    return function;
}

bool nvs_real_exists(nvs_id id)
{
    return strcmp(names[id], "cuCtxRecordEvent") != 0;
}

nvs_ledger nvs_ledgers[NVS_MAX_GPUS];

/* --- what init.c is to the hook --- */

const nvs_port nvs_coordinator = {
    .wait_for_lease = nvs_agent_wait_for_lease,
    .attach = nvs_agent_attach,
    .memory_changed = nvs_agent_memory_changed,
    .reserve = nvs_agent_reserve,
    .reserve_pins = nvs_agent_reserve_pins,
    .reserve_host = nvs_agent_reserve_host,
};
void (*const nvs_fork_handlers[])(void) = {nvs_gate_after_fork, nvs_pacing_after_fork, nvs_marks_after_fork, nvs_agent_after_fork, NULL};

__attribute__((constructor)) static void at_load(void)
{
    nvs_start();
}

__attribute__((destructor)) static void at_exit(void)
{
    nvs_agent_goodbye();
}

/* --- contexts: the primary ones --- */

static _Atomic(CUcontext) primary[NVS_MAX_GPUS];

bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument)
{
    CUcontext context = atomic_load_explicit(&primary[gpu], memory_order_relaxed);
    if (context != NULL)
        (void)visit(context, argument);
    return true;
}

void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument)
{
}

bool nvs_context_enter(CUcontext context)
{
    return NVS_REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

static uint32_t current(void)
{
    CUdevice device = 0;
    return NVS_REAL(cuCtxGetDevice)(&device) == CUDA_SUCCESS ? (uint32_t)device : NVS_NO_GPU;
}

nvs_status nvs_gpu_describe(uint32_t gpu, nvs_gpu_facts *out)
{
    (void)snprintf(out->uuid, sizeof out->uuid, "GPU-51a15eed-0000-4000-8000-%012u", gpu);
    out->total_bytes = (uint64_t)16 << 30;
    return NVS_OK;
}

/* --- memory: a counter --- */

static _Atomic uint64_t allocated, reserved;
static _Atomic bool reserve_first;

void nvs_memory_usage(uint32_t gpu, nvs_usage *out)
{
    uint64_t bytes = atomic_load_explicit(&allocated, memory_order_relaxed);
    *out = (nvs_usage){.allocated_bytes = bytes, .resident_bytes = bytes};
}

void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, bool reserve)
{
    atomic_store_explicit(&reserve_first, reserve, memory_order_relaxed);
}

void nvs_memory_set_room(uint32_t gpu, uint64_t bytes)
{
}

void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes)
{
    atomic_store_explicit(&reserved, reserved_bytes, memory_order_relaxed);
}

nvs_status nvs_memory_evict(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    *moved_bytes = 0;
    if (watch->room(watch->argument, bytes, true))
        watch->moved(watch->argument, 0);
    return NVS_OK;
}

nvs_status nvs_memory_restore(uint32_t gpu, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    return nvs_memory_evict(gpu, bytes, watch, moved_bytes);
}

bool nvs_memory_open_gate(uint32_t gpu, bool paced, uint64_t *missing_bytes)
{
    nvs_gate_open(gpu, paced);
    return true;
}

void nvs_memory_prepare_host(uint32_t gpu, uint64_t bytes)
{
}

/* --- host memory: none --- */

void nvs_host_set_share(bool known, uint64_t bytes)
{
}

uint64_t nvs_host_share_in_use(void)
{
    return 0;
}

bool nvs_host_spare_share(uint64_t *out)
{
    return false;
}

/* --- the calls of agent_client.c --- */

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    CUresult result = NVS_REAL(cuDevicePrimaryCtxRetain)(context, device);
    if (result == CUDA_SUCCESS)
        atomic_store_explicit(&primary[device], *context, memory_order_relaxed);
    return result;
}

CUresult cuLaunchKernel(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
                        unsigned int bz, unsigned int shared, CUstream stream, void **parameters, void **extra)
{
    uint32_t gpu = current();
    nvs_slot *slot = nvs_gate_enter(gpu);
    CUresult result = NVS_REAL(cuLaunchKernel)(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
    if (nvs_gate_leave(slot, gpu))
        nvs_pace_after(gpu, stream, false, nvs_pace_what(NVS_ID_cuLaunchKernel, f, gx));
    return result;
}

CUresult cuGraphLaunch(CUgraphExec graph, CUstream stream)
{
    uint32_t gpu = current();
    nvs_slot *slot = nvs_gate_enter(gpu);
    CUresult result = NVS_REAL(cuGraphLaunch)(graph, stream);
    if (nvs_gate_leave(slot, gpu))
        nvs_pace_after(gpu, stream, false, nvs_pace_what(NVS_ID_cuGraphLaunch, graph, 0));
    return result;
}

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    uint32_t gpu = current();
    nvs_slot *slot = nvs_gate_enter(gpu);
    atomic_fetch_add_explicit(&nvs_hot.capturing, 1, memory_order_relaxed);
    CUresult result = NVS_REAL(cuStreamBeginCapture_v2)(stream, mode);
    (void)nvs_gate_leave(slot, gpu);
    return result;
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    CUresult result = NVS_REAL(cuStreamEndCapture)(stream, graph);
    atomic_fetch_sub_explicit(&nvs_hot.capturing, 1, memory_order_relaxed);
    return result;
}

CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    nvs_agent_attach(0);
    uint64_t total = atomic_load_explicit(&allocated, memory_order_relaxed) + bytes;
    if (atomic_load_explicit(&reserve_first, memory_order_relaxed) &&
        total > atomic_load_explicit(&reserved, memory_order_relaxed) && nvs_agent_reserve(0, total) == NVS_REFUSED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = NVS_REAL(cuMemAlloc_v2)(pointer, bytes);
    if (result == CUDA_SUCCESS) {
        atomic_fetch_add_explicit(&allocated, bytes, memory_order_relaxed);
        nvs_agent_memory_changed(0);
    }
    return result;
}
