/* Copies chunks out and in, in three stages with a thread each.  Allocation of host memory, mapping and unmapping can take long beside
 * another program's copies, so they run before and after the copies, and the link is never idle.
 *
 *            prepare                          copy              finish
 *   out      takes host memory                device to host    unmaps, counts
 *   in       may wait for the goal; maps      host to device    frees host memory
 *
 * The copying stage runs on the caller's thread.  If threads cannot be started, all stages run there, one chunk after the other.
 *
 * The context is held by a visit (contexts/context.h), so that it does not end meanwhile.  Any live context of the GPU serves.
 *
 * A lane has the streams and events of a GPU's moves.  It is made before memory fills the card and kept from one move to the next, because the driver makes
 * no stream on a full card (measured on a driver 580).
 *
 * They belong to a context.  A thread that ends the context destroys them first, or the driver destroys them with it.
 */
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "swap/swap.h"

#include <pthread.h>
#include <string.h>

enum { LANE_STREAMS = 2, LANE_EVENTS = 6 };
typedef struct lane { /* the streams and events of a GPU's moves */
    CUcontext context; /* NULL: empty */
    CUstream streams[LANE_STREAMS];
    CUevent events[LANE_EVENTS];
} lane;

NVS_FORK_STATE static lane lanes[NVS_MAX_GPUS]; /* used by the GPU's mover; `context` is under the lock of swap.h, as other threads report its end */

static void destroy_lane(lane *with)
{
    for (unsigned i = 0; i < LANE_STREAMS; i++)
        if (with->streams[i] != NULL)
            NVS_REAL(cuStreamDestroy_v2)(with->streams[i]);
    for (unsigned i = 0; i < LANE_EVENTS; i++)
        if (with->events[i] != NULL)
            NVS_REAL(cuEventDestroy_v2)(with->events[i]);
    *with = (lane){0};
}

static CUresult make_lane(CUcontext context, lane *out)
{
    lane made = {.context = context};
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < LANE_STREAMS && result == CUDA_SUCCESS; i++)
        result = NVS_REAL(cuStreamCreate)(&made.streams[i], CU_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < LANE_EVENTS && result == CUDA_SUCCESS; i++)
        result = NVS_REAL(cuEventCreate)(&made.events[i], CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (result != CUDA_SUCCESS)
        destroy_lane(&made);
    *out = made;
    return result;
}

/* Destroys the old lane while a visit holds its context; without a visit the lane ends with the context. */
static void replace_lane(lane *with, const lane *made)
{
    nvs_swap_lock();
    const CUcontext before = with->context;
    nvs_swap_unlock();
    const size_t visit = nvs_context_hold(before);
    nvs_swap_lock();
    lane old = *with; /* empty if the thread that ends its context has taken it */
    *with = *made;
    nvs_swap_unlock();
    if (old.context != NULL && visit != 0)
        destroy_lane(&old);
    nvs_context_unhold(visit);
}

/* Mover thread; the context is current. */
static CUresult swap_lane(uint32_t gpu, CUcontext context, lane **out)
{
    lane *const with = &lanes[gpu];
    *out = with;
    nvs_swap_lock();
    bool there = with->context == context;
    nvs_swap_unlock();
    if (there)
        return CUDA_SUCCESS;
    lane made;
    const CUresult result = make_lane(context, &made);
    if (result == CUDA_SUCCESS)
        replace_lane(with, &made);
    return result;
}

/* Visit of nvs_each_context. */
static bool make_first(CUcontext context, void *argument)
{
    lane *const with = argument;
    CUcontext ignored;
    lane made;
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

static lane take_lane_of(CUcontext context, uint32_t gpu)
{
    lane taken = {0};
    nvs_swap_lock();
    if (lanes[gpu].context == context) {
        taken = lanes[gpu];
        lanes[gpu] = (lane){0};
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
        lane old = take_lane_of(context, gpu);
        if (old.context != NULL && nvs_context_enter(context)) {
            destroy_lane(&old);
            NVS_REAL(cuCtxPopCurrent_v2)(&context);
        }
    }
}

NVS_FORK_CODE void nvs_swap_lanes_after_fork(void)
{
    static const lane none;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (memcmp(&lanes[gpu], &none, sizeof none) != 0)
            lanes[gpu] = none;
}

CUresult nvs_swap_fill(const nvs_segment *segment, const nvs_chunk *chunks, uint32_t count, CUcontext context)
{
    lane *with;
    CUresult result = swap_lane(segment->gpu, context, &with);
    if (result != CUDA_SUCCESS)
        return result;
    for (uint32_t i = 0; i < count; i++)
        for (uint32_t grain = 0; grain < chunks[i].grains && result == CUDA_SUCCESS; grain++)
            result = NVS_REAL(cuMemcpyHtoDAsync_v2)(segment->base + (chunks[i].at + grain) * NVS_HOST_GRAIN, chunks[i].host[grain],
                                                    NVS_HOST_GRAIN, with->streams[0]);
    const CUresult ended = NVS_REAL(cuStreamSynchronize)(with->streams[0]);
    return result == CUDA_SUCCESS ? ended : result;
}

enum { STREAMS = LANE_STREAMS, IN_FLIGHT = LANE_EVENTS, RING = 16, MOST_ADJACENT = 8 };

typedef struct flight { /* a chunk that moves; each stage hands it to the next under the pipeline's lock */
    void *host[NVS_CHUNK_GRAINS];
    CUresult failed; /* its copy could not be queued */
    bool skipped;    /* it does not move: freed meanwhile, or the job has stopped */
    bool copied;     /* it has contents to copy */
} flight;

/* Place n of the job has flights[n % RING], and its copy events[n % IN_FLIGHT]. */
typedef struct pipeline {
    nvs_transfer *job;
    lane *lane;
    CUcontext context;
    flight flights[RING];
    pthread_mutex_t lock; /* taken with no other lock; never held during a driver call */
    pthread_cond_t changed;
    /* Under the lock: how many places each stage has finished.  Only that stage writes it. */
    size_t prepared, queued, finished;
    bool all_prepared; /* the first stage has ended */
    bool stopped;      /* something failed: no stage begins a new chunk */
} pipeline;

static void fail(pipeline *p, nvs_status status, CUresult result)
{
    pthread_mutex_lock(&p->lock);
    if (p->job->status == NVS_OK) {
        p->job->status = status;
        p->job->failure = result;
    }
    p->stopped = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
}

static void set_state(const nvs_place *of, nvs_chunk_state state, int64_t on_gpu, void *const *host)
{
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    nvs_swap_lock();
    chunk->state = (uint8_t)state;
    for (uint32_t i = 0; i < chunk->grains; i++)
        chunk->host[i] = host != NULL ? host[i] : NULL;
    if (state == NVS_CHUNK_RESIDENT)
        chunk->restored = ++nvs_swap_gpus[of->segment->gpu].restorations;
    nvs_segment_moved(of->segment, on_gpu);
    nvs_swap_unlock();
}

static void account(const nvs_place *of, int64_t on_gpu)
{
    nvs_swap_lock();
    nvs_segment_moved(of->segment, on_gpu);
    nvs_swap_unlock();
}

static uint32_t grains_of(const nvs_place *of)
{
    return of->segment->chunks[of->chunk].grains;
}

static bool is_dead(const nvs_place *of)
{
    nvs_swap_lock();
    bool dead = of->segment->node.dead;
    nvs_swap_unlock();
    return dead;
}

uint64_t nvs_transfer_left(const nvs_transfer *job, uint64_t moved_bytes, uint64_t least_bytes)
{
    return job->watch == NULL ? UINT64_MAX : job->watch->left(job->watch->argument, moved_bytes, least_bytes);
}

/* --- first stage --- */

/* How many of the places, from the first one on, are adjacent and can be mapped in one step. */
static size_t count_adjacent(const nvs_place *places, size_t count)
{
    static const uint64_t ENOUGH = NVS_CHUNK_GRAINS * NVS_HOST_GRAIN;
    uint64_t bytes = places[0].bytes;
    size_t found = 1;
    while (found < count && found < MOST_ADJACENT && bytes + places[found].bytes <= ENOUGH &&
           nvs_chunks_adjoin(&places[found - 1], &places[found]) && !is_dead(&places[found]))
        bytes += places[found++].bytes;
    return found;
}

/* Maps chunks; returns how many of them, from the first one on.  `begun`: bytes before them. */
static size_t map_some(pipeline *p, const nvs_place *places, size_t count, uint64_t begun)
{
    CUresult result;
    uint64_t waited_ns = 0;
    for (;; count = 1) {
        for (size_t i = 0; i < count; i++) /* before they are mapped: a report never counts too little */
            account(&places[i], (int64_t)places[i].bytes);
        result = nvs_chunks_map(places, count);
        if (result == CUDA_SUCCESS)
            return count;
        for (size_t i = 0; i < count; i++)
            account(&places[i], -(int64_t)places[i].bytes);
        /* A process that has just ended may still have the memory that the coordinator counts as free. */
        bool retry = result == CUDA_ERROR_OUT_OF_MEMORY && p->job->watch != NULL && p->job->watch->promised;
        if (count == 1 && !(retry && nvs_transfer_left(p->job, begun, 0) >= places[0].bytes && nvs_swap_pause(&waited_ns)))
            break;
    }
    fail(p, result == CUDA_ERROR_OUT_OF_MEMORY ? NVS_NO_MEMORY : NVS_CUDA_FAILED, result);
    return 0;
}

/* Prepares at most `most` places from place n on; returns how many, 0: the stage ends.  `begun` counts the bytes so far.  A chunk that does not fit
 * below the goal is passed over: a smaller one may. */
static size_t prepare_in(pipeline *p, size_t n, size_t most, uint64_t *begun)
{
    const nvs_place *places = p->job->places + n;
    size_t count = count_adjacent(places, most);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        bytes += places[i].bytes;
    if (count > 1 && nvs_transfer_left(p->job, *begun, 0) < bytes) { /* then one by one */
        count = 1;
        bytes = places[0].bytes;
    }
    const uint64_t left = nvs_transfer_left(p->job, *begun, bytes);
    if (left < bytes) {
        p->flights[n % RING] = (flight){.skipped = true};
        return left != 0;
    }
    count = map_some(p, places, count, *begun);
    for (size_t i = 0; i < count; i++) {
        const nvs_chunk *chunk = &places[i].segment->chunks[places[i].chunk];
        flight *f = &p->flights[(n + i) % RING];
        *f = (flight){.copied = chunk->state != NVS_CHUNK_UNBACKED};
        for (uint32_t grain = 0; grain < chunk->grains; grain++)
            f->host[grain] = chunk->host[grain];
        *begun += places[i].bytes;
    }
    return count;
}

static size_t prepare_out(pipeline *p, size_t n, uint64_t *begun)
{
    const nvs_place *of = &p->job->places[n];
    flight *f = &p->flights[n % RING];
    if (nvs_transfer_left(p->job, *begun, 0) == 0)
        return 0;
    *f = (flight){.copied = true};
    *begun += of->bytes;
    if (nvs_host_take(p->job->gpu, grains_of(of), f->host))
        return 1;
    fail(p, NVS_NO_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
    return 0;
}

/* See prepare_in. */
static size_t prepare(pipeline *p, size_t n, size_t most, uint64_t *begun)
{
    if (nvs_context_ends(p->context))
        return 0; /* a thread waits to end it; another context may serve for the rest */
    if (is_dead(&p->job->places[n])) {
        p->flights[n % RING] = (flight){.skipped = true};
        return 1;
    }
    return p->job->out ? prepare_out(p, n, begun) : prepare_in(p, n, most, begun);
}

/* --- second stage --- */

/* Adjacent grains go in one copy. */
static CUresult copy(const pipeline *p, size_t n, const flight *f, CUstream stream)
{
    const nvs_place *of = &p->job->places[n];
    const uint32_t grains = grains_of(of);
    CUdeviceptr address = nvs_segment_chunk_address(of->segment, of->chunk);
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0, run; i < grains && result == CUDA_SUCCESS; i += run, address += run * NVS_HOST_GRAIN) {
        for (run = 1; i + run < grains && (char *)f->host[i + run] == (char *)f->host[i] + run * NVS_HOST_GRAIN;)
            run++;
        result = p->job->out ? NVS_REAL(cuMemcpyDtoHAsync_v2)(f->host[i], address, run * NVS_HOST_GRAIN, stream)
                             : NVS_REAL(cuMemcpyHtoDAsync_v2)(address, f->host[i], run * NVS_HOST_GRAIN, stream);
    }
    return result;
}

static void queue(pipeline *p, size_t n, bool stopped)
{
    flight *f = &p->flights[n % RING];
    CUstream stream = p->lane->streams[n % STREAMS];
    if (f->skipped || !f->copied)
        return;
    if (p->job->out && (stopped || nvs_context_ends(p->context))) { /* not begun; a copy in is still made, as its chunk is mapped */
        nvs_host_give(grains_of(&p->job->places[n]), f->host);
        f->skipped = true;
        return;
    }
    f->failed = copy(p, n, f, stream);
    if (f->failed == CUDA_SUCCESS)
        f->failed = NVS_REAL(cuEventRecord)(p->lane->events[n % IN_FLIGHT], stream);
}

/* --- third stage --- */

static void count_moved(pipeline *p, uint64_t bytes)
{
    const nvs_watch *watch = p->job->watch;
    p->job->moved_bytes += bytes;
    if (watch != NULL)
        watch->moved(watch->argument, p->job->moved_bytes);
}

/* A chunk leaves the GPU only after its copy to the host has completed. */
static void finish_out(pipeline *p, const nvs_place *of, flight *f, CUresult copied)
{
    CUresult result = copied == CUDA_SUCCESS ? nvs_chunk_unmap(of->segment, of->chunk) : copied;
    if (result != CUDA_SUCCESS) {
        nvs_host_give(grains_of(of), f->host);
        fail(p, NVS_CUDA_FAILED, result);
        return;
    }
    set_state(of, NVS_CHUNK_EVICTED, -(int64_t)of->bytes, f->host);
    count_moved(p, of->bytes);
}

static void finish_in(pipeline *p, const nvs_place *of, flight *f, CUresult copied)
{
    if (copied != CUDA_SUCCESS) { /* the host still has the contents */
        fail(p, NVS_CUDA_FAILED, copied);
        if (nvs_chunk_unmap(of->segment, of->chunk) == CUDA_SUCCESS)
            account(of, -(int64_t)of->bytes);
        return;
    }
    set_state(of, NVS_CHUNK_RESIDENT, 0, NULL);
    if (f->copied)
        nvs_host_give(grains_of(of), f->host);
    count_moved(p, of->bytes);
}

static void finish(pipeline *p, size_t n)
{
    flight *f = &p->flights[n % RING];
    if (f->skipped)
        return;
    CUresult copied = f->failed;
    if (f->copied && copied == CUDA_SUCCESS)
        copied = NVS_REAL(cuEventSynchronize)(p->lane->events[n % IN_FLIGHT]);
    for (unsigned i = 0; copied != CUDA_SUCCESS && i < STREAMS; i++)
        NVS_REAL(cuStreamSynchronize)(p->lane->streams[i]); /* after any failure both ends may still be in use */
    (p->job->out ? finish_out : finish_in)(p, &p->job->places[n], f, copied);
}

/* --- one thread --- */

static void run_on_this_thread(pipeline *p)
{
    uint64_t begun = p->job->moved_bytes;
    for (size_t n = 0; n < p->job->count && !p->stopped && prepare(p, n, 1, &begun) != 0; n++) {
        queue(p, n, p->stopped);
        finish(p, n);
    }
}

/* --- three threads --- */

static void enter(const pipeline *p, bool *pushed)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the application's captures are not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    *pushed = nvs_context_enter(p->context);
}

static void leave(bool pushed)
{
    CUcontext ignored;
    if (pushed)
        NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
}

static void *prepare_all(void *argument)
{
    pipeline *p = argument;
    uint64_t begun = p->job->moved_bytes;
    bool pushed;
    enter(p, &pushed);
    for (size_t n = 0, count; n < p->job->count; n += count) {
        pthread_mutex_lock(&p->lock);
        while (n - p->finished >= RING && !p->stopped)
            nvs_cond_wait(&p->changed, &p->lock, NULL);
        bool stopped = p->stopped;
        size_t most = RING - (n - p->finished), left = p->job->count - n;
        pthread_mutex_unlock(&p->lock);
        count = stopped ? 0 : prepare(p, n, most < left ? most : left, &begun);
        if (count == 0)
            break;
        pthread_mutex_lock(&p->lock);
        p->prepared += count;
        pthread_cond_broadcast(&p->changed);
        pthread_mutex_unlock(&p->lock);
    }
    pthread_mutex_lock(&p->lock);
    p->all_prepared = true;
    pthread_cond_broadcast(&p->changed);
    pthread_mutex_unlock(&p->lock);
    leave(pushed);
    return NULL;
}

static void queue_all(pipeline *p)
{
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while ((p->queued == p->prepared && !p->all_prepared) || p->queued - p->finished >= IN_FLIGHT)
            nvs_cond_wait(&p->changed, &p->lock, NULL);
        if (p->queued == p->prepared)
            break;
        bool stopped = p->stopped;
        pthread_mutex_unlock(&p->lock);
        queue(p, p->queued, stopped); /* `queued` is written here alone */
        pthread_mutex_lock(&p->lock);
        p->queued++;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
}

static void *finish_all(void *argument)
{
    pipeline *p = argument;
    bool pushed;
    enter(p, &pushed);
    pthread_mutex_lock(&p->lock);
    for (;;) {
        while (p->finished == p->queued && !(p->all_prepared && p->queued == p->prepared))
            nvs_cond_wait(&p->changed, &p->lock, NULL);
        if (p->finished == p->queued)
            break;
        pthread_mutex_unlock(&p->lock);
        finish(p, p->finished); /* `finished` is written here alone */
        pthread_mutex_lock(&p->lock);
        p->finished++;
        pthread_cond_broadcast(&p->changed);
    }
    pthread_mutex_unlock(&p->lock);
    leave(pushed);
    return NULL;
}

/* False: the threads could not be started, and no chunk was begun. */
static bool run_on_three_threads(pipeline *p)
{
    pthread_t first, last;
    if (nvs_thread_start(&last, finish_all, p) != 0)
        return false;
    if (nvs_thread_start(&first, prepare_all, p) != 0) {
        pthread_mutex_lock(&p->lock);
        p->all_prepared = true;
        pthread_cond_broadcast(&p->changed);
        pthread_mutex_unlock(&p->lock);
        pthread_join(last, NULL);
        p->all_prepared = false;
        return false;
    }
    queue_all(p);
    pthread_join(first, NULL);
    pthread_join(last, NULL);
    return true;
}

void nvs_swap_transfer(nvs_transfer *job, CUcontext context)
{
    pipeline p = {.job = job, .context = context};
    CUresult result = swap_lane(job->gpu, context, &p.lane);
    if (result != CUDA_SUCCESS) {
        job->status = NVS_CUDA_FAILED;
        job->failure = result;
        return;
    }
    pthread_mutex_init(&p.lock, NULL);
    pthread_cond_init(&p.changed, NULL);
    if (job->count <= 1 || !run_on_three_threads(&p))
        run_on_this_thread(&p);
    pthread_cond_destroy(&p.changed);
    pthread_mutex_destroy(&p.lock);
}
