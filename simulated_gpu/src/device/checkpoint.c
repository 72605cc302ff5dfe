/* The start of the driver in a process, and its checkpoint by other processes (cuCheckpointProcess*).
 *
 *   RUNNING -- Lock --> LOCKED -- Checkpoint --> CHECKPOINTED -- Restore --> LOCKED -- Unlock --> RUNNING
 *
 * cuInit starts the restore thread of the process, which takes the steps.  A caller writes a request into the entry of the process in
 * the shared file and sleeps until it is answered.  A request outlives its caller.
 * A locked process has no work and no thread inside a call; new calls wait.  Device memory of the simulation is private host memory, so a
 * checkpoint takes the time of a copy, and gives back the charges and contexts of the process.  All handles and addresses stay.
 *
 * Rules that cuda.h does not state, as users of driver 580 and newer report them:
 *  - Without the right to look into the process the result is OPERATING_SYSTEM.
 *  - A restoration without room is OUT_OF_MEMORY, the process stays CHECKPOINTED, and each later restoration is OPERATING_SYSTEM.
 *  - GPUs that gpuPairs does not name stay, and no two GPUs of the machine become one, whether or not the process sees them.
 *  - After a restoration on another GPU the UUID is that of the new GPU, and the PCI address that of the old one.
 *  - Managed memory and memory shared with other processes are NOT_SUPPORTED, MIG instances OUT_OF_MEMORY.
 * Assumed: INVALID_VALUE if there is no such process, NOT_INITIALIZED if it has no CUDA, OPERATING_SYSTEM if it dies in a step; clients of
 * MPS are NOT_SUPPORTED; a refused checkpoint leaves the process LOCKED; calls of a FAILED process return UNKNOWN; persistence mode is off.
 *
 * A fault of the function in the calling process refuses the call.  A fault in the other process strikes inside the step: a checkpoint or
 * restoration ends in FAILED; Lock and Unlock leave the state as it was.
 */
#include "memory/memory.h"

#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { STEP_LOCK, STEP_CHECKPOINT, STEP_RESTORE, STEP_UNLOCK };

#define SINCE 12080       /* the driver that has these functions */
#define SINCE_PAIRS 13000 /* gpuPairs */

/* The steps, on the restore thread with the lock. */

static struct {
    uint64_t bytes, contexts;
} kept[NVS_SIM_MAX_GPUS]; /* by ordinal: what a checkpointed process gave back */
static bool restoration_failed;

static void pause_ns(uint64_t ns)
{
    const struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    pthread_mutex_unlock(&nvs_sim_lock);
    nanosleep(&pause, NULL);
    pthread_mutex_lock(&nvs_sim_lock);
}

static bool in_use(void)
{
    bool busy = nvs_sim_calls != 0;
    for (int i = 0; i < nvs_sim_device_count; i++)
        busy = busy || nvs_sim_devices[i].executor.busy != NULL;
    return busy;
}

static CUresult unlock_calls(const nvs_sim_request *request)
{
    nvs_sim_locked = false;
    pthread_cond_broadcast(&nvs_sim_done);
    return CUDA_SUCCESS;
}

static CUresult lock_calls(const nvs_sim_request *request)
{
    struct timespec end; /* on the clock of the condition */
    int late = 0;
    clock_gettime(CLOCK_REALTIME, &end);
    const uint64_t ns = (uint64_t)end.tv_nsec + request->timeout_ms * UINT64_C(1000000);
    end.tv_sec += (time_t)(ns / 1000000000u);
    end.tv_nsec = (long)(ns % 1000000000u);
    nvs_sim_locked = true;
    while (in_use() && late == 0)
        late = request->timeout_ms == 0 ? pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock)
                                        : pthread_cond_timedwait(&nvs_sim_done, &nvs_sim_lock, &end);
    if (!in_use())
        return CUDA_SUCCESS;
    unlock_calls(request);
    return CUDA_ERROR_NOT_READY;
}

/* Found before anything has moved. */
static CUresult refusal(void)
{
    if (nvs_sim_settings.mps.client || nvs_sim_managed_count != 0 || nvs_sim_shared_physical != 0)
        return CUDA_ERROR_NOT_SUPPORTED;
    NVS_SIM_EACH_ALLOCATION(one)
        if (one->kind == MEM_IMPORTED || one->ipc.file != 0)
            return CUDA_ERROR_NOT_SUPPORTED;
    for (int i = 0; i < nvs_sim_device_count; i++)
        if (nvs_sim_devices[i].instance && nvs_sim_devices[i].contexts != NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
    return CUDA_SUCCESS;
}

static CUresult checkpoint(const nvs_sim_request *request)
{
    uint64_t bytes = 0;
    NVS_SIM_TRY(refusal());
    for (int i = 0; i < nvs_sim_device_count; i++) {
        const uint32_t gpu = nvs_sim_devices[i].gpu;
        kept[i].bytes = nvs_sim_shared_state->gpus[gpu].integrated ? 0 : nvs_sim_self->fixed_bytes[gpu]; /* copied within one memory */
        kept[i].contexts = nvs_sim_self->attached[gpu];
        bytes += kept[i].bytes;
    }
    pause_ns(nvs_sim_copy_ns(bytes));
    for (int i = 0; i < nvs_sim_device_count; i++) {
        nvs_sim_uncharge(nvs_sim_devices[i].gpu, kept[i].bytes);
        nvs_sim_attach(nvs_sim_devices[i].gpu, -(int)kept[i].contexts);
    }
    return CUDA_SUCCESS;
}

static CUresult restore(const nvs_sim_request *request)
{
    uint64_t bytes = 0;
    NVS_SIM_CHECK(!restoration_failed, CUDA_ERROR_OPERATING_SYSTEM);
    for (int i = 0; i < nvs_sim_device_count; i++) {
        const bool named = request->mapped == 0 || (request->mapped >> nvs_sim_devices[i].gpu & 1) != 0;
        NVS_SIM_CHECK(named || (kept[i].bytes == 0 && kept[i].contexts == 0), CUDA_ERROR_INVALID_VALUE);
    }
    for (int i = 0; i < nvs_sim_device_count; i++) {
        restoration_failed = !nvs_sim_charge(request->target[nvs_sim_devices[i].gpu], kept[i].bytes);
        while (restoration_failed && i-- > 0)
            nvs_sim_uncharge(request->target[nvs_sim_devices[i].gpu], kept[i].bytes);
        NVS_SIM_CHECK(!restoration_failed, CUDA_ERROR_OUT_OF_MEMORY);
        bytes += kept[i].bytes;
    }
    pause_ns(nvs_sim_copy_ns(bytes));
    for (int i = 0; i < nvs_sim_device_count; i++) {
        sim_device *device = &nvs_sim_devices[i];
        nvs_sim_wake(device); /* its executor sleeps on a word of the old GPU */
        nvs_sim_device_place(device, request->target[device->gpu]);
        nvs_sim_attach(device->gpu, (int)kept[i].contexts);
    }
    return CUDA_SUCCESS;
}

static const struct {
    const char *function;
    CUprocessState from, to;
    bool moves; /* a fault in its middle loses the process */
    CUresult (*run)(const nvs_sim_request *request);
} steps[] = {
    [STEP_LOCK] = {"cuCheckpointProcessLock", CU_PROCESS_STATE_RUNNING, CU_PROCESS_STATE_LOCKED, false, lock_calls},
    [STEP_CHECKPOINT] = {"cuCheckpointProcessCheckpoint", CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_CHECKPOINTED, true, checkpoint},
    [STEP_RESTORE] = {"cuCheckpointProcessRestore", CU_PROCESS_STATE_CHECKPOINTED, CU_PROCESS_STATE_LOCKED, true, restore},
    [STEP_UNLOCK] = {"cuCheckpointProcessUnlock", CU_PROCESS_STATE_LOCKED, CU_PROCESS_STATE_RUNNING, false, unlock_calls},
};

/* The state is atomic because other processes read it; only this thread writes it. */
static CUresult take_step(nvs_sim_checkpoint *own)
{
    const nvs_sim_request request = own->request;
    if (atomic_load_explicit(&own->state, memory_order_relaxed) != steps[request.step].from)
        return CUDA_ERROR_ILLEGAL_STATE;
    pthread_mutex_unlock(&nvs_sim_lock);
    CUresult result = nvs_sim_fault(steps[request.step].function);
    pthread_mutex_lock(&nvs_sim_lock);
    CUprocessState to = steps[request.step].to;
    if (result == CUDA_SUCCESS) {
        NVS_SIM_TRY(steps[request.step].run(&request));
    } else if (steps[request.step].moves) {
        to = CU_PROCESS_STATE_FAILED;
        nvs_sim_failed = true;
        unlock_calls(&request);
    } else {
        return result;
    }
    atomic_store_explicit(&own->state, to, memory_order_relaxed);
    return result;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value, const struct timespec *most)
{
    syscall(SYS_futex, word, FUTEX_WAIT, value, most, NULL, 0);
}

static void store_and_wake(_Atomic uint32_t *word, uint32_t value)
{
    /* Release: pairs with the acquire loads of the same words; the request or the result is written. */
    atomic_store_explicit(word, value, memory_order_release);
    syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

static uint32_t acquire(const _Atomic uint32_t *word) { return atomic_load_explicit(word, memory_order_acquire); }

static void *serve(void *argument)
{
    nvs_sim_checkpoint *own = argument;
    prctl(PR_SET_NAME, "simulated_ckpt");
    pthread_mutex_lock(&nvs_sim_lock);
    atomic_store_explicit(&own->thread, (uint32_t)syscall(SYS_gettid), memory_order_relaxed);
    pthread_cond_broadcast(&nvs_sim_done);
    for (;;) {
        const uint32_t asked = acquire(&own->asked), answered = acquire(&own->answered);
        if (asked == answered) {
            pthread_mutex_unlock(&nvs_sim_lock);
            futex_wait(&own->asked, asked, NULL);
            pthread_mutex_lock(&nvs_sim_lock);
            continue;
        }
        /* Relaxed: the count of answers publishes the result. */
        atomic_store_explicit(&own->results[asked % NVS_SIM_RESULTS], (uint32_t)take_step(own), memory_order_relaxed);
        store_and_wake(&own->answered, asked);
    }
    return NULL;
}

SIM_EXPORT CUresult CUDAAPI cuInit(unsigned int Flags)
{
    NVS_SIM_ENTER_RAW();
    NVS_SIM_CHECK(!nvs_sim_forked, CUDA_ERROR_NOT_INITIALIZED);
    NVS_SIM_CHECK(Flags == 0, CUDA_ERROR_INVALID_VALUE);
    if (nvs_sim_initialised)
        return CUDA_SUCCESS;
    NVS_SIM_TRY(nvs_sim_devices_open());
    nvs_sim_checkpoint *own = &nvs_sim_self->checkpoint;
    nvs_sim_initialised = true; /* before the wait: cuInit of another thread starts nothing */
    if (nvs_sim_settings.driver_version >= SINCE && nvs_sim_start_thread(serve, own))
        while (atomic_load_explicit(&own->thread, memory_order_relaxed) == 0)
            pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
    return CUDA_SUCCESS;
}

/* The callers.  They need no cuInit, except for a restoration, and hold no lock while they wait. */

static CUresult begin(const char *function, bool started)
{
    NVS_SIM_HOLD_LOCK(nvs_sim_enter(function, false));
    NVS_SIM_TRY(entered);
    NVS_SIM_CHECK(nvs_sim_settings.driver_version >= SINCE, CUDA_ERROR_NOT_SUPPORTED);
    NVS_SIM_CHECK(!started || (nvs_sim_initialised && !nvs_sim_forked), CUDA_ERROR_NOT_INITIALIZED);
    return nvs_sim_state_open();
}

/* False also after exec, which ends the thread. */
static bool serves(int pid, uint32_t thread)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task/%u", pid, thread);
    return access(path, F_OK) == 0;
}

/* With the lock of the shared file. */
static CUresult find(int pid, nvs_sim_checkpoint **out)
{
    nvs_sim_shared *shared = nvs_sim_shared_state;
    struct stat info;
    char path[64];
    snprintf(path, sizeof path, "/proc/%d", pid);
    NVS_SIM_CHECK(pid > 0 && stat(path, &info) == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(geteuid() == 0 || geteuid() == info.st_uid, CUDA_ERROR_OPERATING_SYSTEM);
    nvs_sim_shared_reap(shared);
    for (uint32_t i = 0; i < shared->processes_used; i++) {
        *out = &shared->processes[i].checkpoint;
        if (nvs_sim_shared_names((uint32_t)pid, &shared->processes[i]) && serves(pid, acquire(&(*out)->thread)))
            return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_INITIALIZED;
}

static bool zeros(const void *bytes, size_t from, size_t to)
{
    while (from < to && ((const char *)bytes)[from] == 0)
        from++;
    return from == to;
}

/* A whole GPU; -1: there is none with this UUID. */
static int gpu_of(const CUuuid *uuid)
{
    for (uint32_t i = 0; i < nvs_sim_shared_state->gpu_count; i++)
        if (nvs_sim_shared_state->gpus[i].instance == 0 && memcmp(nvs_sim_shared_state->gpus[i].uuid, uuid->bytes, sizeof uuid->bytes) == 0)
            return (int)i;
    return -1;
}

static CUresult map_gpus(const CUcheckpointRestoreArgs *args, nvs_sim_request *out)
{
    uint32_t taken = 0;
    for (uint32_t i = 0; i < NVS_SIM_MAX_GPUS; i++)
        out->target[i] = (uint8_t)i;
    if (args == NULL)
        return CUDA_SUCCESS;
    NVS_SIM_CHECK(args->gpuPairsCount == 0 || (args->gpuPairs != NULL && nvs_sim_settings.driver_version >= SINCE_PAIRS),
                  CUDA_ERROR_INVALID_VALUE);
    for (uint32_t i = 0; i < args->gpuPairsCount; i++) {
        const int old = gpu_of(&args->gpuPairs[i].oldUuid), new = gpu_of(&args->gpuPairs[i].newUuid);
        NVS_SIM_CHECK(old >= 0 && new >= 0 && (out->mapped >> old & 1) == 0, CUDA_ERROR_INVALID_VALUE);
        out->mapped |= 1u << old;
        out->target[old] = (uint8_t)new;
    }
    for (uint32_t i = 0; i < nvs_sim_shared_state->gpu_count; i++) {
        NVS_SIM_CHECK((taken >> out->target[i] & 1) == 0, CUDA_ERROR_INVALID_VALUE);
        taken |= 1u << out->target[i];
    }
    return CUDA_SUCCESS;
}

static CUresult ask(const char *function, int pid, nvs_sim_request request, const void *args, size_t known, size_t size)
{
    const struct timespec look = {.tv_nsec = 50000000}; /* then the caller looks whether the process lives */
    NVS_SIM_TRY(begin(function, request.step == STEP_RESTORE));
    NVS_SIM_CHECK(args == NULL || zeros(args, known, size), CUDA_ERROR_INVALID_VALUE);
    if (request.step == STEP_RESTORE)
        NVS_SIM_TRY(map_gpus(args, &request));
    for (;;) {
        nvs_sim_checkpoint *process = NULL;
        uint32_t thread = 0, number = 0, answered;
        bool idle = false;
        nvs_sim_shared_lock(nvs_sim_shared_state);
        const CUresult result = find(pid, &process);
        if (result == CUDA_SUCCESS) {
            thread = acquire(&process->thread);
            number = acquire(&process->asked);
            idle = number == acquire(&process->answered);
        }
        if (idle) {
            process->request = request;
            store_and_wake(&process->asked, ++number);
        }
        nvs_sim_shared_unlock(nvs_sim_shared_state);
        NVS_SIM_TRY(result);
        while ((int32_t)((answered = acquire(&process->answered)) - number) < 0 && serves(pid, thread))
            futex_wait(&process->answered, answered, &look);
        if (idle) /* the entry of a dead process may belong to another one by now */
            return serves(pid, thread) ? (CUresult)acquire(&process->results[number % NVS_SIM_RESULTS]) : CUDA_ERROR_OPERATING_SYSTEM;
    }
}

static CUresult read_entry(const char *function, int pid, bool thread, void *out)
{
    nvs_sim_checkpoint *process;
    NVS_SIM_TRY(begin(function, false));
    NVS_SIM_CHECK(out != NULL, CUDA_ERROR_INVALID_VALUE);
    nvs_sim_shared_lock(nvs_sim_shared_state);
    const CUresult result = find(pid, &process);
    if (result == CUDA_SUCCESS)
        memcpy(out, &(uint32_t){acquire(thread ? &process->thread : &process->state)}, sizeof(uint32_t));
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return result;
}

SIM_EXPORT CUresult CUDAAPI cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) { return read_entry(__func__, pid, true, tid); }
SIM_EXPORT CUresult CUDAAPI cuCheckpointProcessGetState(int pid, CUprocessState *state) { return read_entry(__func__, pid, false, state); }

SIM_EXPORT CUresult CUDAAPI cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
    const nvs_sim_request request = {.step = STEP_LOCK, .timeout_ms = args != NULL ? args->timeoutMs : 0};
    return ask(__func__, pid, request, args, sizeof args->timeoutMs, sizeof *args);
}

SIM_EXPORT CUresult CUDAAPI cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
    return ask(__func__, pid, (nvs_sim_request){.step = STEP_CHECKPOINT}, args, 0, sizeof *args);
}

SIM_EXPORT CUresult CUDAAPI cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
    const size_t known = offsetof(CUcheckpointRestoreArgs, gpuPairsCount) + sizeof args->gpuPairsCount;
    return ask(__func__, pid, (nvs_sim_request){.step = STEP_RESTORE}, args, known, sizeof *args);
}

SIM_EXPORT CUresult CUDAAPI cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
    return ask(__func__, pid, (nvs_sim_request){.step = STEP_UNLOCK}, args, 0, sizeof *args);
}
