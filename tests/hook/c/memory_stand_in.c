/* Stand-ins for the hook's other parts, for tests of the memory side alone (memory_fake.c). */
#include "base/clock.h"
#include "base/config.h"
#include "base/log.h"
#include "base/port.h"
#include "contexts/context.h"
#include "contexts/gpu_cache.h"
#include "contexts/which_gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "inflight/pacing.h"
#include "ipc/ipc.h"
#include "memory_fake.h"
#include "swap/swap.h"

#include <pthread.h>

nvs_settings nvs_config = {.enabled = true, .memory_mode = NVS_MODE_MANAGED};
int nvs_log_level = NVS_LOG_OFF;
_Atomic(nvs_function) nvs_reals[NVS_ID_COUNT];

static _Atomic uint64_t clock_ns = 1000000000;
nvs_status fake_reserve_answer = NVS_OK;
uint64_t fake_reserve_asked[64];
unsigned fake_reserves;
static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER;

void nvs_log(int level, const char *format, ...)
{
}

uint64_t nvs_now_ns(void) /* time passes by being looked at, so that bounded waits end at once */
{
    return atomic_fetch_add_explicit(&clock_ns, 50000000, memory_order_relaxed);
}

static void attach(uint32_t gpu)
{
}

static void memory_changed(uint32_t gpu)
{
}

static nvs_status reserve(uint32_t gpu, uint64_t total_bytes)
{
    pthread_mutex_lock(&asking);
    if (fake_reserves < 64)
        fake_reserve_asked[fake_reserves++] = total_bytes;
    pthread_mutex_unlock(&asking);
    if (fake_reserve_answer == NVS_OK)
        nvs_memory_set_reserved(gpu, total_bytes);
    return fake_reserve_answer;
}

static nvs_status reserve_pins(uint32_t gpu, uint64_t total_bytes)
{
    return NVS_UNAVAILABLE;
}

static void reserve_host(uint64_t total_bytes)
{
}

const nvs_port nvs_coordinator = {
    .attach = attach,
    .memory_changed = memory_changed,
    .reserve = reserve,
    .reserve_pins = reserve_pins,
    .reserve_host = reserve_host,
};
const nvs_backend *const nvs_memory_chunked = &nvs_backend_swap;
void (*const nvs_swap_freed)(uint32_t gpu, CUdeviceptr address) = nvs_ipc_withdraw;

_Atomic uint32_t nvs_gpu_generation;
_Thread_local nvs_gpu_cache nvs_cached_gpu;

CUcontext nvs_owner_context(void)
{
    CUcontext context = NULL;
    NVS_REAL(cuCtxGetCurrent)(&context);
    return context;
}

/* Python's thread, which has a slot once it has allocated: of what it allocates in stream order next, some goes the short way. */
static bool goes_shortly;
static nvs_slot only_slot;

void fake_set_short(bool shortly)
{
    goes_shortly = shortly;
    atomic_store_explicit(&nvs_hot.only_context, NULL, memory_order_relaxed); /* until it is asked for again */
}

CUcontext nvs_usual_owner(void)
{
    const CUcontext context = nvs_owner_context();
    if (goes_shortly) {
        nvs_gate_alone();
        nvs_self = &only_slot;
        only_slot.owner_uses = 3;
        atomic_store_explicit(&nvs_hot.only_context, context, memory_order_relaxed);
    }
    return context;
}

uint32_t nvs_ask_current_gpu(void)
{
    return 0;
}

uint32_t nvs_ask_stream_gpu(CUstream stream)
{
    return 0;
}

nvs_hot_page nvs_hot; /* one GPU, number 0 */
_Thread_local nvs_slot *nvs_self; /* none: every call goes ungated */

nvs_slot *nvs_slot_register(void)
{
    return NULL;
}

void nvs_gate_enter_slow(nvs_slot *slot, uint32_t gpu)
{
}

bool nvs_gate_leave_slow(nvs_slot *slot, uint32_t gpu)
{
    return false;
}

void nvs_pace_after(uint32_t gpu, CUstream stream, bool per_thread, uint64_t what)
{
}

void nvs_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t deadline_ns) /* who waits looks again at once */
{
}

void nvs_futex_wake(_Atomic uint32_t *word, int threads)
{
}

void nvs_gate_open(uint32_t gpu, bool paced)
{
    atomic_store_explicit(&nvs_hot.gates[gpu], NVS_GATE_OPEN, memory_order_release);
}

nvs_gate nvs_gates[NVS_MAX_GPUS];

void nvs_gate_set_dead(uint32_t gpu, bool dead)
{
    atomic_store_explicit(&nvs_gates[gpu].dead, dead, memory_order_seq_cst);
}

void fake_close_gate(void)
{
    atomic_store_explicit(&nvs_hot.gates[0], NVS_GATE_CLOSED, memory_order_release);
}

nvs_status nvs_drain(uint32_t gpu, uint64_t deadline_ns)
{
    return NVS_OK;
}

bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument)
{
    visit((CUcontext)(uintptr_t)0x100, argument);
    return true;
}

bool nvs_context_possible(uint32_t gpu)
{
    return gpu == 0;
}

bool nvs_context_enter(CUcontext context)
{
    return NVS_REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

bool nvs_context_ends(CUcontext context)
{
    return false;
}

size_t nvs_context_hold(CUcontext context)
{
    return 1;
}

void nvs_context_unhold(size_t visit)
{
}

uint32_t nvs_context_gpu(CUcontext context)
{
    return 0;
}

uint32_t fake_short_left(void)
{
    return only_slot.owner_uses;
}

void fake_set_capturing(bool capturing)
{
    if (capturing != fake_stream_captures) /* as context.c counts */
        atomic_fetch_add_explicit(&nvs_hot.capturing, capturing ? 1u : UINT32_MAX, memory_order_relaxed);
    fake_stream_captures = capturing;
}

void fake_set_reserve_answer(int answer)
{
    fake_reserve_answer = (nvs_status)answer;
    fake_reserves = 0;
}

void fake_set_mode(int mode)
{
    nvs_config.memory_mode = (uint8_t)mode;
}
