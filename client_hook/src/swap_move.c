/* Evicting and restoring: which chunks make up what is wanted, and the whole of one move.
 *
 * Runs on the GPU's mover thread (agent_moves.h).
 *
 * May not go here: which move is wanted, and when; how chunks move (swap_pipeline.c).
 */
#include "swap.h"

#include "context.h"
#include "cuda_api.h"
#include "log.h"

#include <stdlib.h>

typedef struct mover {
    uint32_t gpu;
    bool out, ran;
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
    return m->out ? chunk->state == NVS_CHUNK_RESIDENT : nvs_chunk_is_missing(chunk->state);
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
    nvs_segment_let_go(of->segment);
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

static bool run_in(CUcontext context, void *argument)
{
    mover *m = argument;
    CUcontext ignored;
    if (!nvs_context_enter(context))
        return true; /* another one may do */
    m->ran = true;
    nvs_transfer job = {.gpu = m->gpu, .out = m->out, .places = m->places, .count = m->count, .watch = m->watch};
    nvs_swap_transfer(&job, context);
    m->moved = job.moved_bytes;
    m->status = job.status;
    m->failure = job.failure;
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

nvs_status nvs_swap_move(uint32_t gpu, bool out, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    mover m = {.gpu = gpu, .out = out, .watch = watch};
    *moved_bytes = 0;
    if (bytes == 0)
        return NVS_OK;
    const uint64_t began = nvs_now_ns();
    if (!gather(&m))
        return NVS_NO_MEMORY;
    if (m.count == 0)
        return NVS_OK;
    choose(&m, bytes);
    if (out) {
        qsort(m.places, m.count, sizeof *m.places, by_preference_in); /* what comes in was chosen in this order */
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
    if (m.count != 0 && !m.ran) {
        m.status = NVS_CUDA_FAILED;
        m.failure = CUDA_ERROR_INVALID_CONTEXT;
    }
    for (size_t i = 0; i < m.count; i++)
        let_go(&m.places[i]);
    free(m.places);
    nvs_swap_lock();
    nvs_swap_gpu *of = &nvs_swap_gpus[gpu];
    *(out ? &of->moved_out : &of->moved_in) += m.moved;
    *(out ? &of->out_ns : &of->in_ns) += nvs_now_ns() - began;
    nvs_swap_unlock();
    *moved_bytes = m.moved;
    if (m.status != NVS_OK) /* room that is not there is asked for again: the agent says so once */
        nvs_log(m.failure == CUDA_ERROR_OUT_OF_MEMORY && !out ? NVS_LOG_INFO : NVS_LOG_WARNING,
                "moving memory %s stopped after %llu MiB (error %d); nothing is lost, the rest stays where it is",
                out ? "off the GPU" : "to the GPU", (unsigned long long)(m.moved >> 20), (int)m.failure);
    return m.status;
}
