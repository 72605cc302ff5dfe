/* See marks.h. */
#include "inflight/marks.h"

#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { CHECK_EVERY = 64 }; /* after this many new marks, as many old ones are queried */

typedef struct mark {
    struct mark *next;
    CUevent event;
    CUcontext context;
    uint32_t gpus, gpu_of_stream;
    uint64_t number;
    bool busy; /* a thread queries it, and removes it when it is finished */
    bool dead; /* its context has ended, and its event with it */
} mark;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "marks" in the lock order of base/base.h */
NVS_FORK_STATE static mark *first, **last = &first;
NVS_FORK_STATE static _Atomic uint32_t count; /* changes under the lock.  Relaxed: the gate orders a drain after the submissions that it waits for */
NVS_FORK_STATE static uint32_t since_checked; /* new marks */
static uint64_t newest;          /* the number of the mark made last */

CUresult nvs_event_behind(CUstream stream, CUevent *event, CUcontext *context)
{
    CUcontext current = NULL, ignored;
    CUresult result = NVS_REAL(cuStreamGetCtx)(stream, context);
    if (result != CUDA_SUCCESS)
        return result;
    NVS_REAL(cuCtxGetCurrent)(&current);
    const bool enter = *context != current;
    if (enter && !nvs_context_enter(*context))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    result = NVS_REAL(cuEventCreate)(event, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS) {
        result = NVS_REAL(cuEventRecord)(*event, stream);
        if (result != CUDA_SUCCESS)
            NVS_REAL(cuEventDestroy_v2)(*event);
    }
    if (enter)
        NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return result;
}

/* Locked. */
static void append(mark *made)
{
    made->next = NULL;
    *last = made;
    last = &made->next;
    atomic_fetch_add_explicit(&count, 1, memory_order_relaxed);
}

/* Locked. */
static void unlist(mark *gone)
{
    mark **link = &first;
    while (*link != gone)
        link = &(*link)->next;
    *link = gone->next;
    if (last == &gone->next)
        last = link;
    atomic_fetch_sub_explicit(&count, 1, memory_order_relaxed);
}

/* Claims the first mark in a context that concerns one of these GPUs.  NULL: none, or another thread queries it (*pending). */
static mark *claim(uint32_t gpus, CUcontext context, uint64_t upto, bool *pending)
{
    pthread_mutex_lock(&lock);
    mark *at = first;
    while (at != NULL && (at->dead || at->context != context || (at->gpus & gpus) == 0 || at->number > upto))
        at = at->next;
    *pending = at != NULL && at->busy;
    if (*pending)
        at = NULL;
    if (at != NULL)
        at->busy = true;
    pthread_mutex_unlock(&lock);
    return at;
}

/* True: the claimed mark is unfinished, and goes to the end, so that the next claim finds another.  A finished mark is freed. */
static bool query(mark *claimed)
{
    const bool pending = NVS_REAL(cuEventQuery)(claimed->event) == CUDA_ERROR_NOT_READY; /* after any other error its work does not run */
    pthread_mutex_lock(&lock);
    unlist(claimed);
    claimed->busy = false;
    const bool dead = claimed->dead;
    if (pending && !dead)
        append(claimed);
    pthread_mutex_unlock(&lock);
    if (pending && !dead)
        return true;
    if (!dead)
        (void)NVS_REAL(cuEventDestroy_v2)(claimed->event);
    free(claimed);
    return false;
}

bool nvs_mark_pending(uint32_t gpu, CUcontext context, uint64_t upto)
{
    bool pending = false;
    mark *claimed;
    while (!pending && (claimed = claim(1u << gpu, context, upto, &pending)) != NULL)
        pending = query(claimed);
    return pending;
}

/* Queries some marks of this context, and frees the finished ones. */
static void free_finished(CUcontext context)
{
    const uint32_t all = atomic_load_explicit(&count, memory_order_relaxed); /* see its declaration */
    bool elsewhere;
    mark *claimed;
    CUcontext ignored;
    if (!nvs_context_enter(context))
        return;
    for (uint32_t left = all < CHECK_EVERY ? all : CHECK_EVERY; left != 0 && (claimed = claim(UINT32_MAX, context, UINT64_MAX, &elsewhere)) != NULL; left--)
        (void)query(claimed);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
}

static mark *make(mark what)
{
    mark *made = malloc(sizeof *made);
    if (made != NULL)
        *made = what;
    return made;
}

/* Adds a mark to the list; `marked` false: it got no event. */
static void keep(mark *made, bool marked)
{
    if (!marked) {
        free(made);
        NVS_LOG_ONCE(NVS_LOG_WARNING, "work beside a capture, or of a graph on several GPUs, cannot be followed: a hand-over may not wait for it");
        return;
    }
    const CUcontext context = made->context; /* once listed, another thread may free it */
    pthread_mutex_lock(&lock);
    made->number = ++newest;
    append(made);
    const bool many = ++since_checked >= CHECK_EVERY;
    since_checked = many ? 0 : since_checked;
    pthread_mutex_unlock(&lock);
    if (many)
        free_finished(context);
}

void nvs_mark_stream(uint32_t gpus, uint32_t gpu_of_stream, CUstream stream)
{
    const int saved = errno;
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* so that a capture elsewhere is not invalidated */
    const bool exchanged = NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode) == CUDA_SUCCESS;
    mark *made = make((mark){.gpus = gpus, .gpu_of_stream = gpu_of_stream});
    keep(made, made != NULL && nvs_event_behind(stream, &made->event, &made->context) == CUDA_SUCCESS);
    if (exchanged)
        (void)NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    errno = saved;
}

/* Drivers before 12.5 have no event of a whole context.  Their legacy stream is behind all blocking streams, the per-thread ones among them. */
static CUresult event_behind_all(CUcontext context, CUevent *event)
{
    CUresult result = NVS_REAL(cuEventCreate)(event, CU_EVENT_DISABLE_TIMING);
    if (result != CUDA_SUCCESS)
        return result;
    const CUresult recorded = NVS_REAL(cuCtxRecordEvent)(context, *event);
    result = recorded == CUDA_ERROR_NOT_SUPPORTED ? NVS_REAL(cuEventRecord)(*event, CU_STREAM_LEGACY) : recorded;
    if (result != CUDA_SUCCESS)
        (void)NVS_REAL(cuEventDestroy_v2)(*event);
    return result;
}

void nvs_mark_context(uint32_t gpu, CUcontext context)
{
    CUcontext ignored;
    if (!nvs_context_enter(context))
        return; /* the context is dead, and its work has ended */
    mark *made = make((mark){.gpus = 1u << gpu, .gpu_of_stream = gpu, .context = context});
    keep(made, made != NULL && event_behind_all(context, &made->event) == CUDA_SUCCESS);
    (void)NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
}

uint64_t nvs_marks_made(void)
{
    pthread_mutex_lock(&lock);
    const uint64_t made = newest;
    pthread_mutex_unlock(&lock);
    return made;
}

uint32_t nvs_marked_by(uint32_t gpu)
{
    uint32_t by = 0;
    if (NVS_LIKELY(atomic_load_explicit(&count, memory_order_relaxed) == 0)) /* see its declaration */
        return 0;
    pthread_mutex_lock(&lock);
    for (const mark *at = first; at != NULL; at = at->next)
        if (!at->dead && (at->gpus >> gpu & 1) != 0)
            by |= 1u << at->gpu_of_stream;
    pthread_mutex_unlock(&lock);
    return by;
}

void nvs_marks_context_gone(CUcontext context)
{
    mark *taken = NULL;
    pthread_mutex_lock(&lock);
    for (mark *at = first, *next; at != NULL; at = next) {
        next = at->next;
        if (at->context != context)
            continue;
        at->dead = true;
        if (at->busy)
            continue;
        unlist(at);
        at->next = taken;
        taken = at;
    }
    pthread_mutex_unlock(&lock);
    while (taken != NULL) {
        mark *next = taken->next;
        free(taken);
        taken = next;
    }
}

NVS_FORK_CODE void nvs_marks_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    since_checked = 0;
    first = NULL;                    /* CUDA is not usable here */
    last = &first;
    atomic_store_explicit(&count, 0, memory_order_relaxed);
}
