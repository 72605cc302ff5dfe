/* See captures.h.
 *
 * nvs_hot.capturing counts the entries: open captures, and begins that have not yet returned.  Its bit NVS_CAPTURE_FIRST is set while the first of them
 * leaves the marks of the whole contexts: other begins wait for that, since it would invalidate a capture.
 *
 * One lock, taken with no other and not held while the driver is called.
 */
#include "inflight/captures.h"

#include "base/config.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "inflight/marks.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>

#define FIRST_PATIENCE_NS 1000000000u /* the longest wait for the marks of another begin, whose thread may have died */
#define NAP_NS 20000

typedef struct nvs_capture {
    struct nvs_capture *next;
    const void *key;   /* the stream, or the thread for its per-thread default stream */
    CUcontext context; /* the stream's; NULL: not known */
    CUcontext owner;   /* of a green context: the primary context that it is part of */
    CUgraph graph;     /* the captured graph, where the process sees several GPUs; NULL: not known */
    uint32_t gpu;
} capture;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "captures" in the lock order of base/base.h */
NVS_FORK_STATE static capture *first;
NVS_FORK_STATE static _Atomic uint32_t paused; /* the agent queries streams; see nvs_captures_pause */

static _Thread_local char this_thread __attribute__((tls_model("initial-exec")));

/* ---- Marks ---- */

void nvs_capture_mark(uint32_t gpu, CUstream stream, CUresult result)
{
    const bool is_default = stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
    if (stream == CU_STREAM_LEGACY && !nvs_capturing())
        return;
    if (is_default && result == CUDA_SUCCESS && gpu < NVS_MAX_GPUS && nvs_config.enabled && !nvs_stream_captures(stream))
        nvs_mark_stream(1u << gpu, gpu, stream);
}

void nvs_capture_may_join(uint32_t gpu, CUstream stream)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* so that a capture elsewhere is not invalidated */
    if (stream == CU_STREAM_LEGACY || gpu >= NVS_MAX_GPUS || !nvs_config.enabled) /* the legacy stream is never captured */
        return;
    const bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    if (!nvs_stream_captures(stream) && NVS_REAL(cuStreamQuery)(stream) == CUDA_ERROR_NOT_READY)
        nvs_mark_stream(1u << gpu, gpu, stream);
    if (exchanged)
        (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

static bool mark_context(CUcontext context, void *gpu)
{
    nvs_mark_context(*(uint32_t *)gpu, context);
    return true;
}

static void mark_contexts(void)
{
    for (uint32_t gpu = 0; nvs_config.enabled && gpu < NVS_MAX_GPUS && nvs_context_possible(gpu); gpu++)
        (void)nvs_each_context(gpu, mark_context, &gpu);
}

/* ---- Begin and end ---- */

/* Counts a begin.  True: it is the first, and others wait until its thread has cleared NVS_CAPTURE_FIRST. */
static bool is_first(void)
{
    uint64_t began = 0;
    for (;;) {
        uint32_t seen = atomic_load_explicit(&nvs_hot.capturing, memory_order_relaxed);
        if ((seen & NVS_CAPTURE_FIRST) != 0) {
            began = began != 0 ? began : nvs_now_ns();
            if (nvs_now_ns() - began < FIRST_PATIENCE_NS) {
                nvs_nap(NAP_NS);
                continue;
            }
        }
        /* Acquire pairs with the release in nvs_capture_begins. */
        const bool none = (seen & ~NVS_CAPTURE_HOST) == 0;
        if (atomic_compare_exchange_weak_explicit(&nvs_hot.capturing, &seen, none ? seen | NVS_CAPTURE_FIRST : seen + 1, memory_order_acquire,
                                                  memory_order_relaxed))
            return none;
    }
}

bool nvs_captures_pause(void)
{
    /* seq_cst: pairs with await_resume.  Either it sees the pause, or the pause sees the capture. */
    atomic_store_explicit(&paused, 1, memory_order_seq_cst);
    if ((atomic_load_explicit(&nvs_hot.capturing, memory_order_seq_cst) & ~NVS_CAPTURE_HOST) == 0)
        return true;
    nvs_captures_resume();
    return false;
}

void nvs_captures_resume(void)
{
    atomic_store_explicit(&paused, 0, memory_order_release); /* pairs with await_resume: the queries are over */
}

/* After the begin is counted. */
static void await_resume(void)
{
    atomic_thread_fence(memory_order_seq_cst); /* pairs with nvs_captures_pause */
    const uint64_t began = nvs_now_ns();
    while (atomic_load_explicit(&paused, memory_order_acquire) != 0 && nvs_now_ns() - began < FIRST_PATIENCE_NS)
        nvs_nap(NAP_NS);
}

static void begins(void)
{
    if (!is_first())
        return;
    mark_contexts();
    /* Release pairs with nvs_capturing: the marks exist before a drain trusts in them. */
    (void)atomic_fetch_sub_explicit(&nvs_hot.capturing, NVS_CAPTURE_FIRST - 1, memory_order_release);
}

nvs_capture *nvs_capture_begins(uint32_t gpu, CUstream stream)
{
    const int saved = errno;
    capture *made = malloc(sizeof *made);
    if (made == NULL) {
        errno = saved;
        return NULL;
    }
    begins();
    await_resume();
    nvs_capture_may_join(gpu, stream);
    errno = saved;
    return made;
}

static void count_down(void)
{
    (void)atomic_fetch_sub_explicit(&nvs_hot.capturing, 1, memory_order_relaxed); /* the driver has ended the capture before */
}

void nvs_captures_mark_threads(void)
{
    if ((atomic_load_explicit(&nvs_hot.capturing, memory_order_relaxed) & NVS_CAPTURE_HOST) != 0 || !nvs_config.enabled) /* set once */
        return;
    const int saved = errno;
    begins();
    (void)atomic_fetch_or_explicit(&nvs_hot.capturing, NVS_CAPTURE_HOST, memory_order_relaxed); /* the count before and after it orders the marks */
    count_down();
    errno = saved;
}

/* Locked. */
static void remove_entry(capture **link)
{
    capture *gone = *link;
    *link = gone->next;
    free(gone);
    count_down();
}

/* The per-thread stream is another stream in each context, so its context is compared, too. */
static capture **link_of(const void *key, CUcontext context)
{
    capture **link = &first;
    while (*link != NULL && ((*link)->key != key || (key == &this_thread && (*link)->context != context)))
        link = &(*link)->next;
    return link;
}

static CUcontext context_of(CUstream stream)
{
    CUcontext context = stream != CU_STREAM_PER_THREAD ? nvs_stream_context(stream) : NULL;
    if (stream == CU_STREAM_PER_THREAD)
        (void)NVS_REAL(cuCtxGetCurrent)(&context);
    else if (context == NULL)
        (void)NVS_REAL(cuStreamGetCtx)(stream, &context);
    return context;
}

static const void *key_of(CUstream stream) { return stream == CU_STREAM_PER_THREAD ? &this_thread : (const void *)stream; }

/* The graph that a stream is captured into; NULL in a process that sees one GPU. */
static CUgraph captured_into(CUstream stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    CUgraph graph = NULL;
    if (NVS_LIKELY(nvs_only_gpu() != NVS_NO_GPU) || !nvs_config.enabled)
        return NULL;
    const CUresult result = NVS_REAL(cuStreamGetCaptureInfo_v2)(stream, &status, NULL, &graph, NULL, NULL);
    return result == CUDA_SUCCESS && status == CU_STREAM_CAPTURE_STATUS_ACTIVE ? graph : NULL;
}

uint32_t nvs_capture_joined(uint32_t gpu, CUstream stream)
{
    const CUgraph graph = captured_into(stream);
    uint32_t began_on = NVS_NO_GPU;
    if (graph == NULL || gpu >= NVS_MAX_GPUS)
        return 0;
    pthread_mutex_lock(&lock);
    for (const capture *at = first; at != NULL; at = at->next)
        if (at->graph == graph)
            began_on = at->gpu;
    pthread_mutex_unlock(&lock);
    return began_on < NVS_MAX_GPUS && began_on != gpu ? 1u << began_on | 1u << gpu : 0;
}

void nvs_capture_began(nvs_capture *made, uint32_t gpu, CUstream stream, CUresult result)
{
    if (result != CUDA_SUCCESS) {
        free(made);
        count_down();
        return;
    }
    const CUcontext context = context_of(stream);
    *made = (capture){NULL, key_of(stream), context, nvs_green_owner(context), captured_into(stream), gpu};
    pthread_mutex_lock(&lock);
    capture **known = link_of(made->key, context);
    if (*known != NULL) /* an older capture, whose end the hook has not seen */
        remove_entry(known);
    made->next = first;
    first = made;
    pthread_mutex_unlock(&lock);
}

void nvs_capture_ended(CUstream stream)
{
    CUcontext context = NULL;
    if (stream == CU_STREAM_PER_THREAD)
        (void)NVS_REAL(cuCtxGetCurrent)(&context);
    pthread_mutex_lock(&lock);
    capture **link = link_of(key_of(stream), context);
    if (*link != NULL)
        remove_entry(link);
    pthread_mutex_unlock(&lock);
}

void nvs_capture_lost(CUstream stream)
{
    if (!nvs_capturing() || nvs_stream_captures(stream))
        return;
    pthread_mutex_lock(&lock);
    capture **link = link_of(stream, NULL);
    if (*link != NULL)
        remove_entry(link);
    pthread_mutex_unlock(&lock);
}

void nvs_captures_context_gone(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (capture **link = &first; *link != NULL;)
        if ((*link)->context == context || (*link)->owner == context)
            remove_entry(link);
        else
            link = &(*link)->next;
    pthread_mutex_unlock(&lock);
}

NVS_FORK_CODE void nvs_captures_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    first = NULL;                    /* CUDA is not usable here */
    atomic_store_explicit(&paused, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_hot.capturing, 0, memory_order_relaxed);
}
