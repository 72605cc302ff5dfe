/* Evicting and restoring chunks, as a pipeline: while one chunk is being copied, the one before it is unmapped, or the one after
 * it is mapped.
 *
 * It runs on the agent's thread, in some live context of the GPU: chunks are reachable from all of them.  The context is held by a
 * visit (context.h), so that it does not end in the middle.  Streams and events are kept for the next move.
 *
 * May not go here: which move is wanted, and when.
 */
#include "swap.h"

#include "context.h"
#include "cuda_api.h"
#include "log.h"

#include <stdlib.h>

enum { STREAMS = 2, IN_FLIGHT = 6, MOST_IN_A_ROW = 8 };

typedef struct lane { /* what a GPU's moves are made with */
    CUcontext context; /* NULL: nothing is there */
    CUstream streams[STREAMS];
    CUevent events[IN_FLIGHT];
} lane;

static lane lanes[NVS_MAX_GPUS]; /* of the agent thread; `context` under the lock, for who reports that it is gone */

typedef struct flight {
    nvs_place of;
    void *host[NVS_CHUNK_GRAINS];
} flight;

typedef struct mover {
    uint32_t gpu;
    bool out, ran;
    nvs_place *places;
    size_t count;
    lane *with;
    flight flights[IN_FLIGHT];
    unsigned first, flying;
    unsigned long long submitted;
    uint64_t moved;
    void (*progress)(void *, uint64_t);
    void *argument;
    nvs_status status;
    CUresult failure;
} mover;

/* --- streams and events --- */

static void forget_lane(lane *with)
{
    for (unsigned i = 0; i < STREAMS; i++)
        if (with->streams[i] != NULL)
            NVS_REAL(cuStreamDestroy_v2)(with->streams[i]);
    for (unsigned i = 0; i < IN_FLIGHT; i++)
        if (with->events[i] != NULL)
            NVS_REAL(cuEventDestroy_v2)(with->events[i]);
    *with = (lane){0};
}

/* In the context, which is current. */
static CUresult make_lane(lane *with, CUcontext context)
{
    nvs_swap_lock();
    bool there = with->context == context;
    nvs_swap_unlock();
    if (there)
        return CUDA_SUCCESS;
    lane made = {.context = context};
    CUresult result = CUDA_SUCCESS;
    for (unsigned i = 0; i < STREAMS && result == CUDA_SUCCESS; i++)
        result = NVS_REAL(cuStreamCreate)(&made.streams[i], CU_STREAM_NON_BLOCKING);
    for (unsigned i = 0; i < IN_FLIGHT && result == CUDA_SUCCESS; i++)
        result = NVS_REAL(cuEventCreate)(&made.events[i], CU_EVENT_DISABLE_TIMING | CU_EVENT_BLOCKING_SYNC);
    if (result != CUDA_SUCCESS) {
        forget_lane(&made);
        return result;
    }
    nvs_swap_lock();
    lane old = *with;
    *with = made;
    nvs_swap_unlock();
    if (old.context != NULL)
        forget_lane(&old); /* handles of another context that lives; of one that is gone they were forgotten */
    return CUDA_SUCCESS;
}

void nvs_swap_move_context_gone(CUcontext context)
{
    nvs_swap_lock();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (lanes[gpu].context == context)
            lanes[gpu] = (lane){0}; /* its streams and events went with it */
    nvs_swap_unlock();
}

void nvs_swap_move_after_fork(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        lanes[gpu] = (lane){0};
}

/* --- choosing --- */

static bool wanted(const mover *m, const nvs_chunk *chunk)
{
    return m->out == (chunk->state == NVS_CHUNK_RESIDENT);
}

/* Neighbours stay together: what lies in a row is mapped in one step. */
static int by_place(const nvs_place *left, const nvs_place *right)
{
    CUdeviceptr a = nvs_segment_chunk_address(left->segment, left->chunk), b = nvs_segment_chunk_address(right->segment, right->chunk);
    return a < b ? -1 : a > b;
}

static int by_size(const nvs_place *left, const nvs_place *right)
{
    if (left->bytes != right->bytes)
        return left->bytes > right->bytes ? -1 : 1;
    return by_place(left, right);
}

/* To go out: what has been on the GPU longest without a move, so that all take their turn.  To come in: large before small, which
 * fills the room best. */
static int by_preference_out(const void *a, const void *b)
{
    const nvs_place *left = a, *right = b;
    if (left->restored != right->restored)
        return left->restored < right->restored ? -1 : 1;
    return by_size(left, right);
}

static int by_preference_in(const void *a, const void *b)
{
    return by_size(a, b);
}

static int by_address(const void *a, const void *b)
{
    return by_place(a, b);
}

/* Lists all candidates.  False when the host has no memory for the list. */
static bool gather(mover *m)
{
    size_t room = 0, count = 0;
    nvs_swap_lock();
    for (const nvs_segment *at = nvs_swap_gpus[m->gpu].first; at != NULL; at = at->next)
        for (uint32_t i = 0; i < at->chunk_count; i++)
            room += wanted(m, &at->chunks[i]);
    nvs_swap_unlock();
    if (room == 0)
        return true;
    m->places = malloc(room * sizeof *m->places);
    if (m->places == NULL)
        return false;
    nvs_swap_lock(); /* others may have come meanwhile: they are left for the next time */
    for (nvs_segment *at = nvs_swap_gpus[m->gpu].first; at != NULL; at = at->next)
        for (uint32_t i = 0; i < at->chunk_count && count < room; i++) {
            if (!wanted(m, &at->chunks[i]))
                continue;
            m->places[count++] = (nvs_place){at, i, nvs_segment_chunk_bytes(at, i), at->chunks[i].restored};
            at->users++;
        }
    nvs_swap_unlock();
    m->count = count;
    return true;
}

static void let_go(const nvs_place *of)
{
    nvs_swap_lock();
    bool destroy = --of->segment->users == 0 && of->segment->doomed;
    nvs_swap_unlock();
    if (destroy)
        nvs_segment_destroy(of->segment);
}

/* Keeps what makes up `bytes`: out, at least that with the least too much; in, at most that. */
static void choose(mover *m, uint64_t bytes)
{
    size_t kept = 0, best = SIZE_MAX;
    uint64_t left = bytes;
    qsort(m->places, m->count, sizeof *m->places, m->out ? by_preference_out : by_preference_in);
    for (size_t i = 0; i < m->count; i++) {
        nvs_place here = m->places[i];
        if (here.bytes > left)
            continue;
        left -= here.bytes;
        m->places[i] = m->places[kept];
        m->places[kept++] = here;
    }
    for (size_t i = kept; m->out && left != 0 && i < m->count; i++)
        if (best == SIZE_MAX || m->places[i].bytes < m->places[best].bytes)
            best = i;
    if (best != SIZE_MAX) {
        nvs_place extra = m->places[best];
        m->places[best] = m->places[kept];
        m->places[kept++] = extra;
    }
    for (size_t i = kept; i < m->count; i++)
        let_go(&m->places[i]);
    m->count = kept;
}

/* --- the pipeline --- */

static void fail(mover *m, nvs_status status, CUresult result)
{
    if (m->status != NVS_OK)
        return;
    m->status = status;
    m->failure = result;
}

static void arrived(mover *m, uint64_t bytes)
{
    m->moved += bytes;
    if (m->progress != NULL)
        m->progress(m->argument, m->moved);
}

static void set_state(const nvs_place *of, nvs_chunk_state state, int64_t on_gpu, void *const *host, uint64_t restored)
{
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    nvs_swap_lock();
    chunk->state = (uint8_t)state;
    for (uint32_t i = 0; i < chunk->grains; i++)
        chunk->host[i] = host != NULL ? host[i] : NULL;
    if (restored != 0)
        chunk->restored = restored;
    nvs_segment_moved(of->segment, on_gpu);
    nvs_swap_unlock();
}

static void account(const nvs_place *of, int64_t on_gpu)
{
    nvs_swap_lock();
    nvs_segment_moved(of->segment, on_gpu);
    nvs_swap_unlock();
}

static uint64_t next_restoration(uint32_t gpu)
{
    nvs_swap_lock();
    uint64_t number = ++nvs_swap_gpus[gpu].restorations;
    nvs_swap_unlock();
    return number;
}

/* A chunk's copy to the host has arrived, or failed: only now may it leave the GPU. */
static void finish_out(mover *m, flight *f, CUresult copied)
{
    const uint32_t grains = f->of.segment->chunks[f->of.chunk].grains;
    CUresult result = copied == CUDA_SUCCESS ? nvs_chunk_unmap(f->of.segment, f->of.chunk) : copied;
    if (result != CUDA_SUCCESS) {
        nvs_host_give(grains, f->host);
        fail(m, NVS_CUDA_FAILED, result);
        return;
    }
    set_state(&f->of, NVS_CHUNK_EVICTED, -(int64_t)f->of.bytes, f->host, 0);
    arrived(m, f->of.bytes);
}

static void finish_in(mover *m, flight *f, CUresult copied)
{
    const uint32_t grains = f->of.segment->chunks[f->of.chunk].grains;
    if (copied != CUDA_SUCCESS) { /* the host's copy is still the good one */
        fail(m, NVS_CUDA_FAILED, copied);
        if (nvs_chunk_unmap(f->of.segment, f->of.chunk) == CUDA_SUCCESS)
            account(&f->of, -(int64_t)f->of.bytes);
        return;
    }
    set_state(&f->of, NVS_CHUNK_RESIDENT, 0, NULL, next_restoration(m->gpu));
    nvs_host_give(grains, f->host);
    arrived(m, f->of.bytes);
}

static void finish_oldest(mover *m)
{
    flight *f = &m->flights[m->first];
    CUresult copied = NVS_REAL(cuEventSynchronize)(m->with->events[m->first]);
    for (unsigned i = 0; copied != CUDA_SUCCESS && i < STREAMS; i++)
        NVS_REAL(cuStreamSynchronize)(m->with->streams[i]); /* whatever it was: both ends may still be in use */
    m->first = (m->first + 1) % IN_FLIGHT;
    m->flying--;
    (m->out ? finish_out : finish_in)(m, f, copied);
}

/* Neighbouring grains go in one copy. */
static CUresult copy(const mover *m, const flight *f, CUstream stream)
{
    const uint32_t grains = f->of.segment->chunks[f->of.chunk].grains;
    CUdeviceptr address = nvs_segment_chunk_address(f->of.segment, f->of.chunk);
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0, run; i < grains && result == CUDA_SUCCESS; i += run, address += run * NVS_HOST_GRAIN) {
        for (run = 1; i + run < grains && (char *)f->host[i + run] == (char *)f->host[i] + run * NVS_HOST_GRAIN;)
            run++;
        result = m->out ? NVS_REAL(cuMemcpyDtoHAsync_v2)(f->host[i], address, run * NVS_HOST_GRAIN, stream)
                        : NVS_REAL(cuMemcpyHtoDAsync_v2)(address, f->host[i], run * NVS_HOST_GRAIN, stream);
    }
    return result;
}

/* Queues the copy of a flight whose two ends are there. */
static void take_off(mover *m, flight *f, unsigned slot)
{
    CUstream stream = m->with->streams[m->submitted++ % STREAMS];
    CUresult result = copy(m, f, stream);
    if (result == CUDA_SUCCESS)
        result = NVS_REAL(cuEventRecord)(m->with->events[slot], stream);
    if (result == CUDA_SUCCESS) {
        m->flying++;
        return;
    }
    NVS_REAL(cuStreamSynchronize)(stream); /* a part of it may be under way */
    (m->out ? finish_out : finish_in)(m, f, result);
}

static void send_out(mover *m, const nvs_place *of, flight *f, unsigned slot)
{
    f->of = *of;
    if (!nvs_host_take(m->gpu, of->segment->chunks[of->chunk].grains, f->host)) {
        fail(m, NVS_NO_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
        return;
    }
    take_off(m, f, slot);
}

static bool is_doomed(const nvs_place *of)
{
    nvs_swap_lock();
    bool doomed = of->segment->doomed;
    nvs_swap_unlock();
    return doomed;
}

/* Neighbours among what is to come in, from the first one on, that are mapped in one step.  Small ones only: while a mapping waits
 * for what another program copies, our own copies run out, and the more so the more is mapped at once. */
static size_t in_a_row(const nvs_place *places, size_t count)
{
    static const uint64_t ENOUGH = UINT64_C(16) << 20;
    uint64_t bytes = places[0].bytes;
    size_t found = 1;
    while (found < count && found < MOST_IN_A_ROW && bytes < ENOUGH && nvs_chunks_adjoin(&places[found - 1], &places[found]) &&
           !is_doomed(&places[found]))
        bytes += places[found++].bytes;
    return found;
}

/* Gives chunks their memory; how many of them, from the first one on. */
static size_t map_some(mover *m, const nvs_place *places, size_t count)
{
    CUresult result;
    for (;; count = 1) {
        for (size_t i = 0; i < count; i++) /* before it is there: what is told is never too little */
            account(&places[i], (int64_t)places[i].bytes);
        result = nvs_chunks_map(places, count);
        if (result == CUDA_SUCCESS)
            return count;
        for (size_t i = 0; i < count; i++)
            account(&places[i], -(int64_t)places[i].bytes);
        if (count == 1)
            break;
    }
    fail(m, result == CUDA_ERROR_OUT_OF_MEMORY ? NVS_NO_MEMORY : NVS_CUDA_FAILED, result);
    return 0;
}

/* A mapped chunk gets its contents, if it ever had any. */
static void bring_in(mover *m, const nvs_place *of, flight *f, unsigned slot)
{
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    f->of = *of;
    if (chunk->state == NVS_CHUNK_UNBACKED) {
        set_state(of, NVS_CHUNK_RESIDENT, 0, NULL, next_restoration(m->gpu));
        arrived(m, of->bytes);
        return;
    }
    for (uint32_t i = 0; i < chunk->grains; i++)
        f->host[i] = chunk->host[i];
    take_off(m, f, slot);
}

static unsigned free_slot(mover *m)
{
    if (m->flying == IN_FLIGHT)
        finish_oldest(m);
    return (m->first + m->flying) % IN_FLIGHT;
}

static void run_out(mover *m)
{
    for (size_t i = 0; i < m->count && m->status == NVS_OK; i++) {
        if (is_doomed(&m->places[i]))
            continue; /* freed meanwhile */
        unsigned slot = free_slot(m);
        if (m->status == NVS_OK)
            send_out(m, &m->places[i], &m->flights[slot], slot);
    }
}

static void run_back(mover *m)
{
    for (size_t i = 0, mapped; i < m->count && m->status == NVS_OK; i += mapped) {
        mapped = 1;
        if (is_doomed(&m->places[i]))
            continue;
        mapped = in_a_row(&m->places[i], m->count - i);
        mapped = map_some(m, &m->places[i], mapped);
        for (size_t j = i; j < i + mapped; j++) { /* also after a failure: what is mapped must get what belongs there */
            unsigned slot = free_slot(m);
            bring_in(m, &m->places[j], &m->flights[slot], slot);
        }
    }
}

static void run(mover *m)
{
    (m->out ? run_out : run_back)(m);
    while (m->flying != 0)
        finish_oldest(m);
}

static bool run_in(CUcontext context, void *argument)
{
    mover *m = argument;
    CUcontext ignored;
    if (NVS_REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true; /* another one may do */
    m->ran = true;
    m->with = &lanes[m->gpu];
    CUresult result = make_lane(m->with, context);
    if (result == CUDA_SUCCESS)
        run(m);
    else
        fail(m, NVS_CUDA_FAILED, result);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

nvs_status nvs_swap_move(uint32_t gpu, bool out, uint64_t bytes, void (*progress)(void *, uint64_t), void *argument, uint64_t *moved_bytes)
{
    mover m = {.gpu = gpu, .out = out, .progress = progress, .argument = argument};
    *moved_bytes = 0;
    if (bytes == 0)
        return NVS_OK;
    const uint64_t began = nvs_now_ns();
    if (!gather(&m))
        return NVS_NO_MEMORY;
    if (m.count == 0)
        return NVS_OK;
    choose(&m, bytes);
    qsort(m.places, m.count, sizeof *m.places, by_address); /* what lies in a row is mapped in one step */
    if (out) {
        uint64_t grains = 0;
        for (size_t i = 0; i < m.count; i++)
            grains += m.places[i].bytes / NVS_HOST_GRAIN;
        nvs_host_prepare(gpu, grains);
    }
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* captures of the application must not notice us */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (m.count != 0)
        nvs_each_context(gpu, run_in, &m);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (out)
        nvs_host_prepare(gpu, 0);
    if (m.count != 0 && !m.ran)
        fail(&m, NVS_CUDA_FAILED, CUDA_ERROR_INVALID_CONTEXT);
    for (size_t i = 0; i < m.count; i++)
        let_go(&m.places[i]);
    free(m.places);
    nvs_swap_lock();
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    *(out ? &of->moved_out : &of->moved_in) += m.moved;
    *(out ? &of->out_ns : &of->in_ns) += nvs_now_ns() - began;
    nvs_swap_unlock();
    *moved_bytes = m.moved;
    if (m.status != NVS_OK)
        nvs_log(NVS_LOG_WARNING, "moving memory %s stopped after %llu MiB (error %d); nothing is lost, the rest stays where it is",
                out ? "off the GPU" : "to the GPU", (unsigned long long)(m.moved >> 20), (int)m.failure);
    return m.status;
}
