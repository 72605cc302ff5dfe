/* Evicting, restoring and giving up: which chunks make up what is wanted, and the whole of one move.
 *
 * Runs on the GPU's mover thread (coord/memory/moves.h).
 *
 * May not go here: which move is wanted, and when; how chunks move (pipeline.c).
 */
#include "base/clock.h"
#include "contexts/dead.h"
#include "swap/swap.h"

#include "base/log.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"

#include <stdlib.h>

enum { MOST_FAILURES = 16 }; /* restorations in a row; the agent waits longer and longer between them (coord/lease.c), a second or two in all */

typedef struct mover {
    uint32_t gpu;
    bool out, ran;
    bool lose; /* the contents are given up: with `out` all, else what is missing */
    nvs_place *places;
    size_t count;
    const nvs_watch *watch;
    uint64_t moved;
    nvs_status status;
    CUresult failure;
} mover;

/* --- choosing --- */

static bool wanted(const mover *m, const nvs_chunk *chunk)
{
    const uint8_t state = chunk->state;
    if (m->lose && m->out)
        return state != NVS_CHUNK_PINNED && state != NVS_CHUNK_LOST;
    return m->out ? state == NVS_CHUNK_RESIDENT : nvs_chunk_is_missing(state);
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

/* So does what was chosen go, out as well as in: memory that is handed down has the size that is wanted then, and each small chunk,
 * which takes as long to map as a large one while another program copies, is mapped when that is nearly done. */
static int by_preference_in(const void *a, const void *b)
{
    return by_size(a, b);
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
    nvs_segment_unref(of->segment);
}

static void let_all_go(mover *m)
{
    for (size_t i = 0; i < m->count; i++)
        let_go(&m->places[i]);
    free(m->places);
    m->places = NULL;
    m->count = 0;
}

/* What a context that ends has left. */
static void keep_wanted(mover *m)
{
    size_t kept = 0;
    for (size_t i = 0; i < m->count; i++) {
        nvs_swap_lock();
        const bool keep = wanted(m, &m->places[i].segment->chunks[m->places[i].chunk]);
        nvs_swap_unlock();
        if (keep)
            m->places[kept++] = m->places[i];
        else
            let_go(&m->places[i]);
    }
    m->count = kept;
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

/* --- moving --- */

/* True: another context may do, or do the rest. */
static bool run_in(CUcontext context, void *argument)
{
    mover *m = argument;
    CUcontext ignored;
    bool rest = true;
    if (!nvs_context_enter(context))
        return rest;
    if (nvs_context_error() == CUDA_SUCCESS) {
        m->ran = true;
        nvs_transfer job = {
            .gpu = m->gpu, .out = m->out, .places = m->places, .count = m->count, .watch = m->watch, .moved_bytes = m->moved};
        nvs_swap_transfer(&job, context);
        m->moved = job.moved_bytes;
        m->status = job.status;
        m->failure = job.failure;
        rest = job.status == NVS_OK && nvs_context_ends(context);
    }
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    if (m->ran && rest)
        keep_wanted(m);
    return rest && m->count != 0;
}

static nvs_status move(mover *m, uint64_t bytes)
{
    if (!gather(m))
        return NVS_NO_MEMORY;
    if (m->count != 0)
        choose(m, bytes);
    if (m->count == 0)
        goto out;
    if (m->out) {
        qsort(m->places, m->count, sizeof *m->places, by_preference_in); /* what comes in was chosen in this order */
        uint64_t grains = 0;
        for (size_t i = 0; i < m->count; i++)
            grains += m->places[i].bytes / NVS_HOST_GRAIN;
        nvs_host_prepare(m->gpu, grains);
    }
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* captures of the application must not notice us */
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
    let_all_go(m);
    return m->status;
}

/* --- giving up --- */

/* How much of it was on the GPU. */
static uint64_t lose(const nvs_place *of)
{
    nvs_swap_gpu *gpu = &nvs_swap_gpus[of->segment->gpu];
    nvs_chunk *chunk = &of->segment->chunks[of->chunk];
    nvs_swap_lock();
    const uint8_t state = chunk->state;
    if (state != NVS_CHUNK_PINNED) /* by an application's thread meanwhile */
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
    if (!of->segment->dead) { /* else the line above has done it */
        gpu->committed -= of->bytes;
        of->segment->counted -= of->bytes;
    }
    nvs_swap_unlock();
    if (state == NVS_CHUNK_EVICTED)
        nvs_host_give(chunk->grains, chunk->host);
    return state == NVS_CHUNK_RESIDENT ? of->bytes : 0;
}

/* Of all contexts, which are dead; or what is missing, which cannot come. */
static uint64_t lose_all(uint32_t gpu, bool dead)
{
    mover m = {.gpu = gpu, .out = dead, .lose = true};
    uint64_t left = 0;
    if (!gather(&m))
        return 0; /* the next order finds it */
    for (size_t i = 0; i < m.count; i++)
        left += lose(&m.places[i]);
    let_all_go(&m);
    return left;
}

/* A restoration that fails again and again, though there is room, will not succeed. */
static bool gives_up(const mover *m)
{
    nvs_swap_gpu *of = &nvs_swap_gpus[m->gpu];
    nvs_swap_lock();
    if (m->moved != 0 || m->status == NVS_OK)
        of->failures = 0;
    else
        of->failures += m->status == NVS_CUDA_FAILED && m->ran;
    const bool now = of->failures >= MOST_FAILURES;
    if (now)
        of->failures = 0;
    nvs_swap_unlock();
    return now;
}

static void tell(const mover *m)
{
    const char *const format = "moving memory %s the GPU stopped after %llu MiB (error %d); nothing is lost, the rest stays where it is";
    const unsigned long long mib = m->moved >> 20;
    if (m->out)
        NVS_LOG_ONCE(NVS_LOG_WARNING, format, "off", mib, (int)m->failure);
    else if (m->failure == CUDA_ERROR_OUT_OF_MEMORY)
        nvs_log(NVS_LOG_INFO, format, "to", mib, (int)m->failure); /* it is tried again when there is room: the agent says so once */
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, format, "to", mib, (int)m->failure);
}

nvs_status nvs_swap_move(uint32_t gpu, bool out, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    mover m = {.gpu = gpu, .out = out, .watch = watch};
    *moved_bytes = 0;
    if (bytes == 0)
        return NVS_OK;
    const uint64_t began = nvs_now_ns();
    if (!nvs_gate_dead(gpu))
        m.status = move(&m, bytes);
    nvs_swap_lock();
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    *(out ? &of->moved_out : &of->moved_in) += m.moved;
    *(out ? &of->out_ns : &of->in_ns) += nvs_now_ns() - began;
    nvs_swap_unlock();
    if (nvs_gate_dead(gpu) || (m.status != NVS_OK && nvs_gpu_look_dead(gpu))) {
        const uint64_t left = lose_all(gpu, true);
        m.moved += out ? left : 0;
        m.status = NVS_OK;
    } else if (!out && gives_up(&m)) {
        NVS_LOG_ONCE(NVS_LOG_ERROR, "memory cannot be brought back to GPU %u (error %d): its contents are lost, and what uses them fails", gpu, (int)m.failure);
        (void)lose_all(gpu, false);
        m.status = NVS_OK;
    } else if (m.status != NVS_OK) {
        tell(&m);
    }
    *moved_bytes = m.moved;
    return m.status;
}
