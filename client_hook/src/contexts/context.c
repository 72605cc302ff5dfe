/* The registries of contexts and of streams.
 *
 * The lock of each guards its table.  It is not held during calls of the driver.  Entries never move: a visitor walks by index, takes the lock for each
 * step, and sees each entry that lives throughout exactly once.  A thread that destroys a context waits for its visitors.  The visitor of a stream destroys
 * it if the application destroyed it during the visit, so that it never queries a freed handle.
 *
 * The driver gives the handle of an ended context to a new one, and records of contexts are found by handle.  So the thread that ends a context removes
 * its entry last, after all other records of the handle, and the thread that gets the handle again waits for that.  Until an entry is removed, the handle
 * in a record means its context.  A primary context keeps its handle; one thread at a time retains, releases or resets it (nvs_primary_begin).
 *
 * Dead contexts are those with a sticky error.  After such an error (an illegal address, a trap) the driver answers each call in the context with it, runs
 * none of its work and opens no other context on the GPU for this process, not even after a reset.  Physical memory can still be unmapped and released.
 * So the hook discards the program's memory instead of moving it (swap/move.c), and its calls pass the closed gate (gate/gate.h): each gets the driver's
 * error at once, without a lease.  This applies when all contexts of the GPU are dead, since memory and calls may belong to any of them.
 * A driver that has lost its GPU may fail all copies while its contexts look alive: after consecutive failed moves they count as dead, too (swap/move.c).
 */
#include "contexts/context.h"

#include "base/base.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

_Atomic uint32_t nvs_gpu_generation = 1;
_Thread_local nvs_gpu_cache nvs_cached_gpu __attribute__((tls_model("initial-exec")));

static void gpus_outdated(void)
{
    atomic_fetch_add_explicit(&nvs_gpu_generation, 1, memory_order_release); /* pairs with the acquire loads in gpu.c and gpu.h */
}

#define RECHECK_EVERY 64u     /* uses of the usual owner before the next query of the driver */
#define PATIENCE_NS 10000000000u /* the longest wait for a thread that ends a context, which may have died */

typedef struct context_entry {
    CUcontext context; /* NULL: free */
    uint32_t gpu;
    CUcontext owner; /* of a green context: its primary context */
    uint32_t visitors;
    bool leaving;       /* no new visitors */
    const nvs_slot *by; /* the slot of the thread that ends it; NULL: none */
} context_entry;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static pthread_cond_t visited = PTHREAD_COND_INITIALIZER;
NVS_FORK_STATE static context_entry *contexts;
NVS_FORK_STATE static size_t context_count;
NVS_FORK_STATE static struct {
    CUcontext context;
    CUcontext last; /* the present primary context, or the previous one */
    uint32_t references; /* seen by the wrappers */
    bool changing;       /* by the thread between nvs_primary_begin and nvs_primary_end */
} primaries[NVS_MAX_GPUS];
static _Atomic bool any_green;
static bool forgotten; /* a context is missing: the table could not grow */

NVS_FORK_STATE static _Atomic uint32_t device_count; /* 0: not known, or no driver here.  Relaxed: written with one value only */

void nvs_context_learn(void)
{
    int count = 0;
    if (atomic_load_explicit(&device_count, memory_order_relaxed) != 0)
        return;
    if (NVS_REAL(cuDeviceGetCount)(&count) != CUDA_SUCCESS || count <= 0)
        return;
    nvs_fork_prepare();
    if (count == 1)
        nvs_gate_single_gpu();
    atomic_store_explicit(&device_count, (uint32_t)count, memory_order_relaxed);
}

bool nvs_context_possible(uint32_t gpu)
{
    return gpu < NVS_MAX_GPUS && gpu < atomic_load_explicit(&device_count, memory_order_relaxed);
}

uint32_t nvs_primary_gpu(CUcontext context)
{
    uint32_t gpu = 0;
    pthread_mutex_lock(&lock);
    while (gpu < NVS_MAX_GPUS && primaries[gpu].last != context)
        gpu++;
    pthread_mutex_unlock(&lock);
    return context != NULL && gpu < NVS_MAX_GPUS ? gpu : NVS_NO_GPU;
}

/* ---- Registry ---- */

/* Adds an entry at the end of a table; false: the host has no memory. */
static bool table_extend(void **table, size_t *count, size_t size)
{
    enum { STEP = 64 };
    if (*count % STEP == 0) {
        void *larger = realloc(*table, (*count + STEP) * size);
        if (larger == NULL) {
            NVS_LOG_ONCE(NVS_LOG_ERROR, "no host memory for the list of contexts and streams: a hand-over may not wait for all of their work");
            return false;
        }
        *table = larger;
    }
    memset((char *)*table + *count * size, 0, size);
    ++*count;
    return true;
}

/* Called with the lock held. */
static void learn_only_context(void)
{
    CUcontext only = NULL;
    size_t living = 0;
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context != NULL) {
            only = contexts[i].context;
            living++;
        }
    atomic_store_explicit(&nvs_hot.only_context, living == 1 && !forgotten ? only : NULL, memory_order_relaxed);
}

static context_entry *find_context(CUcontext context)
{
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context)
            return &contexts[i];
    return NULL;
}

/* Called with the lock held.  The driver has given the handle again, so the thread that has ended its last context only removes records. */
static void await_end(CUcontext context)
{
    const context_entry *entry = find_context(context);
    const struct timespec until = entry != NULL && entry->leaving ? nvs_wait_until(PATIENCE_NS) : (struct timespec){0};
    while (entry != NULL && entry->leaving && nvs_cond_wait(&visited, &lock, &until) == 0)
        entry = find_context(context); /* the table may move meanwhile */
}

void nvs_context_created(CUcontext context, uint32_t gpu)
{
    if (context == NULL || gpu == NVS_NO_GPU)
        return;
    pthread_mutex_lock(&lock);
    await_end(context);
    size_t place = context_count;
    for (size_t i = context_count; i-- > 0;) {
        if (contexts[i].context == context) {
            if (contexts[i].gpu != gpu)
                gpus_outdated(); /* a context that ended unseen had this handle */
            contexts[i].gpu = gpu;
            contexts[i].leaving = false;
            goto out;
        }
        if (contexts[i].context == NULL && contexts[i].visitors == 0)
            place = i;
    }
    if (place < context_count || table_extend((void **)&contexts, &context_count, sizeof *contexts))
        contexts[place] = (context_entry){.context = context, .gpu = gpu};
    else
        forgotten = true;
    learn_only_context();
    nvs_gate_set_dead(gpu, false); /* the driver makes no context on a GPU whose contexts are all dead */
out:
    pthread_mutex_unlock(&lock);
}

void nvs_context_is_green(CUcontext context, CUcontext primary)
{
    pthread_mutex_lock(&lock);
    context_entry *entry = find_context(context);
    if (entry != NULL)
        entry->owner = primary;
    pthread_mutex_unlock(&lock);
    /* Relaxed: a thread that makes it current has run this, or got its handle from a thread that has. */
    atomic_store_explicit(&any_green, true, memory_order_relaxed);
}

CUcontext nvs_green_owner(CUcontext context)
{
    if (context == NULL || NVS_LIKELY(!atomic_load_explicit(&any_green, memory_order_relaxed))) /* as above */
        return NULL;
    pthread_mutex_lock(&lock);
    const context_entry *entry = find_context(context);
    const CUcontext owner = entry != NULL ? entry->owner : NULL;
    pthread_mutex_unlock(&lock);
    return owner;
}

CUcontext nvs_owner_context(void)
{
    CUcontext context = NULL;
    /* Tried twice: memory without a known context stays charged after the context's end. */
    if (NVS_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS && NVS_REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS)
        return NULL;
    const CUcontext owner = nvs_green_owner(context);
    return owner != NULL ? owner : context;
}

CUcontext nvs_usual_owner(void)
{
    const CUcontext only = atomic_load_explicit(&nvs_hot.only_context, memory_order_relaxed); /* see base/hot.h */
    nvs_slot *slot = nvs_self;
    if (NVS_LIKELY(only != NULL && slot != NULL) && NVS_LIKELY(slot->owner_uses != 0)) {
        slot->owner_uses--;
        return only;
    }
    const CUcontext context = nvs_owner_context();
    if (slot != NULL)
        slot->owner_uses = context == only ? RECHECK_EVERY : 0; /* else no wrapper has seen the context, or none is current */
    return context;
}

bool nvs_context_leaving(CUcontext context, const nvs_slot *by)
{
    pthread_mutex_lock(&lock);
    context_entry *entry = find_context(context);
    const bool known = entry != NULL;
    if (known) {
        entry->leaving = true;
        entry->by = by;
    }
    pthread_mutex_unlock(&lock);
    return known;
}

void nvs_context_await_visitors(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (const context_entry *entry; (entry = find_context(context)) != NULL && entry->visitors != 0;)
        (void)nvs_cond_wait(&visited, &lock, NULL); /* the table may move meanwhile */
    pthread_mutex_unlock(&lock);
}

uint32_t nvs_context_registered_gpu(CUcontext context)
{
    pthread_mutex_lock(&lock);
    const context_entry *entry = find_context(context);
    const uint32_t gpu = entry != NULL ? entry->gpu : NVS_NO_GPU;
    pthread_mutex_unlock(&lock);
    return gpu;
}

bool nvs_context_ends(CUcontext context)
{
    pthread_mutex_lock(&lock);
    const context_entry *entry = find_context(context);
    const bool ends = entry != NULL && entry->leaving;
    pthread_mutex_unlock(&lock);
    return ends;
}

size_t nvs_context_hold(CUcontext context)
{
    size_t visit = 0;
    pthread_mutex_lock(&lock);
    context_entry *entry = find_context(context);
    if (context != NULL && entry != NULL && !entry->leaving) {
        entry->visitors++;
        visit = (size_t)(entry - contexts) + 1;
    }
    pthread_mutex_unlock(&lock);
    return visit;
}

void nvs_context_unhold(size_t visit)
{
    if (visit == 0)
        return;
    pthread_mutex_lock(&lock);
    contexts[visit - 1].visitors--;
    pthread_cond_broadcast(&visited);
    pthread_mutex_unlock(&lock);
}

void nvs_context_left(CUcontext context, bool ended)
{
    pthread_mutex_lock(&lock);
    context_entry *entry = find_context(context);
    if (entry != NULL) {
        entry->leaving = false;
        entry->context = ended ? NULL : context;
    }
    learn_only_context();
    for (size_t i = 0; i < NVS_MAX_GPUS; i++)
        if (ended && primaries[i].context == context) {
            primaries[i].context = NULL;
            primaries[i].references = 0;
        }
    gpus_outdated();
    pthread_cond_broadcast(&visited);
    pthread_mutex_unlock(&lock);
}

/* ---- Primary contexts ---- */

int nvs_primary_begin(uint32_t gpu)
{
    const int cancel = nvs_cancel_defer(); /* a cancelled thread would leave others waiting */
    const struct timespec until = nvs_wait_until(PATIENCE_NS);
    pthread_mutex_lock(&lock);
    while (gpu < NVS_MAX_GPUS && primaries[gpu].changing && nvs_cond_wait(&visited, &lock, &until) == 0) {
    }
    if (gpu < NVS_MAX_GPUS)
        primaries[gpu].changing = true;
    pthread_mutex_unlock(&lock);
    return cancel;
}

void nvs_primary_end(uint32_t gpu, int cancel)
{
    pthread_mutex_lock(&lock);
    if (gpu < NVS_MAX_GPUS)
        primaries[gpu].changing = false;
    pthread_cond_broadcast(&visited);
    pthread_mutex_unlock(&lock);
    nvs_cancel_allow(cancel);
}

void nvs_primary_retained(uint32_t gpu, CUcontext context)
{
    pthread_mutex_lock(&lock);
    if (gpu < NVS_MAX_GPUS) {
        primaries[gpu].context = primaries[gpu].last = context;
        primaries[gpu].references++;
    }
    pthread_mutex_unlock(&lock);
}

CUcontext nvs_primary_released(uint32_t gpu, bool *last)
{
    CUcontext context = NULL;
    *last = false;
    pthread_mutex_lock(&lock);
    if (gpu < NVS_MAX_GPUS && primaries[gpu].context != NULL) {
        context = primaries[gpu].context;
        if (primaries[gpu].references > 0)
            primaries[gpu].references--;
        *last = primaries[gpu].references == 0;
    }
    pthread_mutex_unlock(&lock);
    return context;
}

/* ---- Visits ---- */

/* A primary context that no wrapper has seen. */
static bool visit_hidden_primary(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument)
{
    unsigned int flags = 0;
    int active = 0;
    CUcontext context = NULL;
    bool go_on = true;
    if (NVS_REAL(cuDevicePrimaryCtxGetState)((CUdevice)gpu, &flags, &active) != CUDA_SUCCESS || !active)
        return true;
    if (NVS_REAL(cuDevicePrimaryCtxRetain)(&context, (CUdevice)gpu) != CUDA_SUCCESS)
        return true;
    if (nvs_context_registered_gpu(context) == NVS_NO_GPU)
        go_on = visit(context, argument);
    NVS_REAL(cuDevicePrimaryCtxRelease_v2)((CUdevice)gpu);
    return go_on;
}

bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument)
{
    bool go_on = true, all = true;
    const int cancel = nvs_cancel_defer(); /* a cancelled visitor would block the thread that ends its context */
    pthread_mutex_lock(&lock);
    for (size_t i = 0; go_on && i < context_count; i++) {
        const CUcontext context = contexts[i].context;
        if (context == NULL || contexts[i].gpu != gpu)
            continue;
        if (contexts[i].leaving) {
            /* acquire: pairs with nvs_gate_leave_nowait; 0: its thread has died in the driver, and never reports the end */
            all = all && (contexts[i].by == NULL || atomic_load_explicit(&contexts[i].by->active, memory_order_acquire) == 0);
            continue;
        }
        contexts[i].visitors++;
        pthread_mutex_unlock(&lock);
        go_on = visit(context, argument);
        pthread_mutex_lock(&lock);
        contexts[i].visitors--;
        pthread_cond_broadcast(&visited);
    }
    const bool hidden = go_on && gpu < NVS_MAX_GPUS && primaries[gpu].context == NULL, changing = hidden && primaries[gpu].changing;
    if (hidden && !changing)
        primaries[gpu].changing = true; /* the thread that would end it waits */
    pthread_mutex_unlock(&lock);
    if (hidden && !changing) {
        visit_hidden_primary(gpu, visit, argument);
        nvs_primary_end(gpu, PTHREAD_CANCEL_DISABLE);
    }
    nvs_cancel_allow(cancel);
    return all && !changing;
}

static bool take_first(CUcontext context, void *found)
{
    *(CUcontext *)found = context;
    return false;
}

CUcontext nvs_any_context(uint32_t gpu)
{
    CUcontext found = NULL;
    (void)nvs_each_context(gpu, take_first, &found);
    return found;
}

/* Other errors do not mean that the context has ended, nor does any error for a registered green context. */
bool nvs_context_lives(CUcontext context)
{
    unsigned int version;
    if (context == NULL)
        return false;
    const CUresult result = NVS_REAL(cuCtxGetApiVersion)(context, &version);
    return (result != CUDA_ERROR_INVALID_CONTEXT && result != CUDA_ERROR_CONTEXT_IS_DESTROYED) || nvs_green_owner(context) != NULL;
}

bool nvs_context_enter(CUcontext context)
{
    return nvs_context_lives(context) && NVS_REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS;
}

typedef struct stream_entry {
    CUstream stream; /* NULL: free */
    CUcontext context;
    uint32_t visitors;
    bool dead; /* destroyed during a visit, by the application or with its context (then NULL) */
} stream_entry;

NVS_FORK_STATE static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static stream_entry *streams;
NVS_FORK_STATE static size_t stream_count;

void nvs_stream_created(CUstream stream, CUcontext context)
{
    pthread_mutex_lock(&streams_lock);
    size_t place = stream_count;
    for (size_t i = stream_count; i-- > 0;)
        if (streams[i].stream == stream || streams[i].stream == NULL)
            place = i;
    if (place < stream_count || table_extend((void **)&streams, &stream_count, sizeof *streams))
        streams[place] = (stream_entry){.stream = stream, .context = context};
    pthread_mutex_unlock(&streams_lock);
}

CUcontext nvs_stream_context(CUstream stream)
{
    CUcontext context = NULL;
    pthread_mutex_lock(&streams_lock);
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].stream == stream)
            context = streams[i].context;
    pthread_mutex_unlock(&streams_lock);
    return context;
}

bool nvs_stream_leaving(CUstream stream, CUcontext *context)
{
    bool destroy = true;
    *context = NULL;
    pthread_mutex_lock(&streams_lock);
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].stream == stream) {
            *context = streams[i].context;
            if (streams[i].visitors != 0) {
                streams[i].dead = true;
                destroy = false;
            } else {
                streams[i].stream = NULL;
            }
        }
    pthread_mutex_unlock(&streams_lock);
    gpus_outdated(); /* a stream of another GPU may get this handle */
    return destroy;
}

void nvs_streams_context_gone(CUcontext context)
{
    pthread_mutex_lock(&streams_lock);
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].context == context) {
            if (streams[i].visitors == 0)
                streams[i].stream = NULL;
            else
                streams[i] = (stream_entry){streams[i].stream, NULL, streams[i].visitors, true};
        }
    pthread_mutex_unlock(&streams_lock);
}

/* Destroys a stream that the application destroyed during a visit. */
static void destroy_now(CUstream stream, CUcontext context)
{
    CUcontext popped;
    const bool pushed = nvs_context_enter(context);
    NVS_REAL(cuStreamDestroy_v2)(stream);
    if (pushed)
        NVS_REAL(cuCtxPopCurrent_v2)(&popped);
}

void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument)
{
    bool go_on = true;
    pthread_mutex_lock(&streams_lock);
    for (size_t i = 0; go_on && i < stream_count; i++) {
        const CUstream stream = streams[i].stream;
        if (stream == NULL || streams[i].context != context || streams[i].dead)
            continue;
        streams[i].visitors++;
        pthread_mutex_unlock(&streams_lock);
        go_on = visit(stream, argument);
        pthread_mutex_lock(&streams_lock);
        if (--streams[i].visitors == 0 && streams[i].dead) {
            const bool context_lives = streams[i].context != NULL;
            streams[i] = (stream_entry){0};
            pthread_mutex_unlock(&streams_lock);
            if (context_lives)
                destroy_now(stream, context);
            pthread_mutex_lock(&streams_lock);
        }
    }
    pthread_mutex_unlock(&streams_lock);
}

NVS_FORK_CODE void nvs_contexts_after_fork(void)
{
    if (stream_count != 0) {
        streams_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* a thread that does not exist here may have held it */
        streams = NULL; /* not freed: another thread may have been inside realloc */
        stream_count = 0;
    }
    if (atomic_load_explicit(&device_count, memory_order_relaxed) == 0)
        return;
    /* Another thread may have held the lock at the fork, and does not exist here. */
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    visited = (pthread_cond_t)PTHREAD_COND_INITIALIZER;
    /* The driver cannot be used in the child. */
    context_count = 0;
    contexts = NULL; /* not freed: another thread may have been inside realloc */
    memset(primaries, 0, sizeof primaries);
    atomic_store_explicit(&device_count, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_hot.only_context, NULL, memory_order_relaxed);
    gpus_outdated();
}

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

bool nvs_is_lasting(CUresult result)
{
    return is_sticky(result) || result == CUDA_ERROR_UNKNOWN || result == CUDA_ERROR_DEVICE_UNAVAILABLE || result == CUDA_ERROR_NO_DEVICE;
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

void nvs_gpu_set_dead(uint32_t gpu, CUresult error)
{
    NVS_LOG_ONCE(NVS_LOG_WARNING, "all contexts of this program on GPU %u have the CUDA error %d until the program ends: its memory there no longer "
                                  "moves", gpu, (int)error);
    nvs_gate_set_dead(gpu, true);
    nvs_coordinator.memory_changed(gpu);
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
    nvs_gpu_set_dead(gpu, found.error);
    return true;
}
