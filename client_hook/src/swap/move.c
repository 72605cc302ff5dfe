/* One move of a GPU's memory: chooses the chunks, evicts or restores them, and discards contents that cannot be moved.
 *
 * Runs on the GPU's mover thread (coord/mover.h).
 *
 * Non-goals: when a move is made; how chunks are copied (pipeline.c).
 */
#include "swap/swap.h"

#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"

#include <stdlib.h>

enum {
    MOST_FAILURES = 16,        /* consecutive failed restorations: one to two seconds with the agent's growing pauses (coord/lease.c) */
    MOST_FAILED_EVICTIONS = 3, /* consecutive ones, in which the driver has failed as a lost GPU does: there are few */
};

/* --- choosing --- */

static bool wanted(const nvs_transfer *m, const nvs_chunk *chunk)
{
    const uint8_t state = chunk->state;
    if (m->discard && m->out)
        return state != NVS_CHUNK_PINNED && state != NVS_CHUNK_LOST;
    return m->out ? state == NVS_CHUNK_RESIDENT : nvs_chunk_is_missing(state);
}

/* By address: adjacent chunks are mapped in one step. */
static int by_place(const nvs_place *left, const nvs_place *right)
{
    CUdeviceptr a = nvs_segment_chunk_address(left->segment, left->chunk), b = nvs_segment_chunk_address(right->segment, right->chunk);
    return a < b ? -1 : a > b;
}

/* Large chunks first: they fill the room best.  Chosen chunks move in this order in both directions.  A small chunk takes as long to map as a
 * large one while another program copies, so small ones come last. */
static int by_size(const void *a, const void *b)
{
    const nvs_place *left = a, *right = b;
    if (left->bytes != right->bytes)
        return left->bytes > right->bytes ? -1 : 1;
    return by_place(left, right);
}

/* Evict the chunk that was restored least recently first. */
static int by_age(const void *a, const void *b)
{
    const nvs_place *left = a, *right = b;
    if (left->restored != right->restored)
        return left->restored < right->restored ? -1 : 1;
    return by_size(left, right);
}

/* Lists all candidates.  False: malloc failed. */
static bool gather(nvs_transfer *m)
{
    size_t room = 0, count = 0;
    nvs_swap_lock();
    for (const nvs_segment *at = nvs_swap_gpus[m->gpu].first; at != NULL; at = at->node.next)
        for (uint32_t i = 0; i < at->chunk_count && (m->only == NULL || m->only == at); i++)
            room += wanted(m, &at->chunks[i]);
    nvs_swap_unlock();
    if (room == 0)
        return true;
    m->places = malloc(room * sizeof *m->places);
    if (m->places == NULL)
        return false;
    nvs_swap_lock(); /* newer candidates are left to the next move */
    for (nvs_segment *at = nvs_swap_gpus[m->gpu].first; at != NULL; at = at->node.next)
        for (uint32_t i = 0; i < at->chunk_count && count < room; i++) {
            if ((m->only != NULL && m->only != at) || !wanted(m, &at->chunks[i]))
                continue;
            m->places[count++] = (nvs_place){at, i, nvs_segment_chunk_bytes(at, i), at->chunks[i].restored};
            at->users++;
        }
    nvs_swap_unlock();
    m->count = count;
    return true;
}

static void free_places(nvs_transfer *m)
{
    for (size_t i = 0; i < m->count; i++)
        nvs_segment_unref(m->places[i].segment);
    free(m->places);
    m->places = NULL;
    m->count = 0;
}

/* Keeps the chunks that an ending context has left unmoved. */
static void keep_wanted(nvs_transfer *m)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->count; i++) {
        nvs_swap_lock();
        const bool keep = wanted(m, &m->places[i].segment->chunks[m->places[i].chunk]);
        nvs_swap_unlock();
        if (keep)
            m->places[kept++] = m->places[i];
        else
            nvs_segment_unref(m->places[i].segment);
    }
    m->count = kept;
}

/* Out: keeps chunks of at least `bytes` in all, with a small surplus.  In, all are tried one after the other, and those move that fit below the goal
 * (pipeline.c). */
static void choose(nvs_transfer *m, uint64_t bytes)
{
    size_t kept = 0, best = SIZE_MAX;
    uint64_t left = bytes;
    qsort(m->places, m->count, sizeof *m->places, by_age);
    for (size_t i = 0; i < m->count; i++) {
        nvs_place here = m->places[i];
        if (here.bytes > left)
            continue;
        left -= here.bytes;
        m->places[i] = m->places[kept];
        m->places[kept++] = here;
    }
    for (size_t i = kept; left != 0 && i < m->count; i++)
        if (best == SIZE_MAX || m->places[i].bytes < m->places[best].bytes)
            best = i;
    if (best != SIZE_MAX) {
        nvs_place extra = m->places[best];
        m->places[best] = m->places[kept];
        m->places[kept++] = extra;
    }
    for (size_t i = kept; i < m->count; i++)
        nvs_segment_unref(m->places[i].segment);
    m->count = kept;
}

/* --- moving --- */

/* True: another context may do the rest. */
static bool run_in(CUcontext context, void *argument)
{
    nvs_transfer *m = argument;
    CUcontext ignored;
    bool go_on = true;
    if (!nvs_context_enter(context))
        return go_on;
    if (nvs_context_error() == CUDA_SUCCESS) {
        m->ran = true;
        nvs_swap_transfer(m, context);
        go_on = m->status == NVS_OK && nvs_context_ends(context);
    }
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    if (m->ran && go_on)
        keep_wanted(m);
    return go_on && m->count != 0;
}

static nvs_status move(nvs_transfer *m)
{
    const uint64_t bytes = m->out ? nvs_transfer_left(m, m->moved_bytes, 0) : UINT64_MAX;
    if (bytes == 0)
        return NVS_OK;
    if (!gather(m))
        return NVS_NO_MEMORY;
    if (m->out && m->count != 0)
        choose(m, bytes);
    if (m->count == 0)
        goto out;
    qsort(m->places, m->count, sizeof *m->places, by_size);
    if (m->out) {
        uint64_t grains = 0;
        for (size_t i = 0; i < m->count; i++)
            grains += m->places[i].bytes / NVS_HOST_GRAIN;
        nvs_host_prepare(m->gpu, grains);
    }
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the application's captures are not disturbed */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    nvs_each_context(m->gpu, run_in, m);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    if (m->out)
        nvs_host_prepare(m->gpu, 0);
    if (!m->ran) {
        m->status = NVS_CUDA_FAILED;
        m->failure = CUDA_ERROR_INVALID_CONTEXT;
    }
out:
    free_places(m);
    return m->status;
}

nvs_status nvs_swap_move_segment(nvs_segment *segment, bool out, CUresult *failure)
{
    nvs_transfer m = {.gpu = segment->gpu, .out = out, .only = segment};
    m.status = move(&m);
    *failure = m.failure;
    return m.status;
}

/* --- discarding --- */

/* Discards a chunk; returns the bytes that were on the GPU. */
static uint64_t discard(const nvs_place *of)
{
    nvs_swap_gpu *gpu = &nvs_swap_gpus[of->segment->gpu];
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    nvs_swap_lock();
    const uint8_t state = chunk->state;
    if (state != NVS_CHUNK_PINNED) /* an application's thread may have pinned it meanwhile */
        chunk->state = NVS_CHUNK_LOST;
    nvs_swap_unlock();
    if (state == NVS_CHUNK_PINNED)
        return 0;
    if (nvs_chunk_is_mapped(state) && nvs_chunk_unmap(of->segment, of->chunk) != CUDA_SUCCESS) {
        nvs_swap_lock();
        chunk->state = state;
        nvs_swap_unlock();
        return 0;
    }
    nvs_swap_lock();
    if (state == NVS_CHUNK_RESIDENT)
        nvs_segment_moved(of->segment, -(int64_t)of->bytes);
    if (!of->segment->node.dead) { /* else nvs_segment_moved has counted it */
        gpu->committed -= of->bytes;
        of->segment->part.committed -= of->bytes;
    }
    nvs_swap_unlock();
    if (state == NVS_CHUNK_EVICTED)
        nvs_host_give(chunk->grains, chunk->host);
    return state == NVS_CHUNK_RESIDENT ? of->bytes : 0;
}

/* `dead`: all contexts are dead, and all chunks are discarded; else the missing ones. */
static uint64_t discard_all(uint32_t gpu, bool dead)
{
    nvs_transfer m = {.gpu = gpu, .out = dead, .discard = true};
    uint64_t left = 0;
    if (!gather(&m))
        return 0; /* the next pass tries again */
    for (size_t i = 0; i < m.count; i++)
        left += discard(&m.places[i]);
    free_places(&m);
    return left;
}

/* Counts consecutive failed restorations that had room; true: too many. */
static bool gives_up(const nvs_transfer *m)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[m->gpu];
    nvs_swap_lock();
    if (m->moved_bytes != 0 || m->status == NVS_OK)
        of->failures = 0;
    else
        of->failures += m->status == NVS_CUDA_FAILED && m->ran;
    const bool now = of->failures >= MOST_FAILURES;
    if (now)
        of->failures = 0;
    nvs_swap_unlock();
    return now;
}

/* Counts consecutive evictions that moved nothing, as the driver failed in a way that no retry mends; true: too many. */
static bool is_lost(const nvs_transfer *m)
{
    uint32_t *const failures = &nvs_swap_gpus[m->gpu].failed_evictions; /* of the GPU's mover */
    const bool failed = m->status == NVS_CUDA_FAILED && m->moved_bytes == 0 && nvs_is_lasting(m->failure);
    *failures = failed ? *failures % MOST_FAILED_EVICTIONS + 1 : 0;
    return *failures == MOST_FAILED_EVICTIONS;
}

static void log_failure(const nvs_transfer *m)
{
    const char *const format = "moving memory %s the GPU stopped after %llu MiB (error %d); nothing is lost, the rest stays where it is";
    const unsigned long long mib = m->moved_bytes >> 20;
    if (m->out)
        NVS_LOG_ONCE(NVS_LOG_WARNING, format, "off", mib, (int)m->failure);
    else if (m->failure == CUDA_ERROR_OUT_OF_MEMORY)
        nvs_log(NVS_LOG_INFO, format, "to", mib, (int)m->failure); /* tried again when there is room; the agent logs that once */
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, format, "to", mib, (int)m->failure);
}

nvs_status nvs_swap_move(uint32_t gpu, bool out, const nvs_watch *watch, uint64_t *moved_bytes)
{
    nvs_transfer m = {.gpu = gpu, .out = out, .watch = watch, .moved_bytes = *moved_bytes};
    if (!nvs_gate_dead(gpu))
        m.status = move(&m);
    const bool given_up = !nvs_gate_dead(gpu) && (out ? is_lost(&m) : gives_up(&m));
    if (given_up && nvs_is_lasting(m.failure))
        nvs_gpu_set_dead(gpu, m.failure);
    if (nvs_gate_dead(gpu) || (m.status != NVS_OK && nvs_gpu_check_dead(gpu))) {
        const uint64_t left = discard_all(gpu, true);
        m.moved_bytes += out ? left : 0;
        m.status = NVS_OK;
    } else if (given_up) {
        NVS_LOG_ONCE(NVS_LOG_ERROR, "memory cannot be brought back to GPU %u (error %d): its contents are lost, and what uses them fails", gpu, (int)m.failure);
        (void)discard_all(gpu, false);
        m.status = NVS_OK;
    } else if (m.status != NVS_OK) {
        log_failure(&m);
    }
    *moved_bytes = m.moved_bytes;
    return m.status;
}
