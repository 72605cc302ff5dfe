/* The pool (pool.h) keeps slabs of host memory and the grains of them that are in use.  Only grains of pinned slabs can be taken.
 *
 * Functions on the table of slabs (slabs_*) run under the pool's lock.  Functions on one slab call the driver and the system, and run unlocked.
 */
#include "host/pool.h"

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "host/system.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

enum { NVS_SLAB_GRAINS = 128 };

typedef struct nvs_slab { /* its memory does not move while a grain is in use */
    nvs_host_mapping mapping;
    uint32_t grains, free_grains; /* `grains` 0: an empty entry of the table */
    bool pinned;          /* else no grain can be taken yet */
    CUcontext registered; /* the context of the registration; NULL: none, and copies are slower */
    uint64_t used[NVS_SLAB_GRAINS / 64];
} nvs_slab;

enum { MAX_SLABS = 8192 };

static nvs_slab slabs[MAX_SLABS];
NVS_FORK_STATE static uint32_t slab_count; /* entries that were ever used */

/* --- one slab --- */

typedef struct registration {
    void *memory;
    size_t bytes;
    CUcontext in;
} registration;

static bool register_in(CUcontext context, void *argument)
{
    registration *r = argument;
    CUcontext ignored;
    if (!nvs_context_enter(context))
        return true;
    CUresult result = NVS_REAL(cuMemHostRegister_v2)(r->memory, r->bytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        r->in = context;
    else if (nvs_context_error() == CUDA_SUCCESS) /* else the context is dead */
        NVS_LOG_ONCE(NVS_LOG_WARNING, "host memory cannot be pinned (error %d): evictions will be slow", (int)result);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

static bool unregister_in(CUcontext context, void *argument)
{
    registration *r = argument;
    CUcontext ignored;
    if (context != r->in || !nvs_context_enter(context))
        return true;
    NVS_REAL(cuMemHostUnregister)(r->memory);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

static bool slab_make(nvs_slab *out, uint32_t grains, uint32_t gpu, bool gently)
{
    *out = (nvs_slab){.grains = grains, .free_grains = grains};
    return nvs_host_map(gpu, grains * NVS_HOST_GRAIN, NVS_HOST_GRAIN, gently, &out->mapping);
}

static void slab_pin(nvs_slab *slab, uint32_t gpu)
{
    registration r = {slab->mapping.memory, slab->grains * NVS_HOST_GRAIN, NULL};
    nvs_each_context(gpu, register_in, &r);
    slab->registered = r.in;
    slab->pinned = true;
}

static void slab_end(const nvs_slab *slab, uint32_t gpu)
{
    registration r = {slab->mapping.memory, slab->grains * NVS_HOST_GRAIN, slab->registered};
    if (slab->registered != NULL)
        nvs_each_context(gpu, unregister_in, &r);
    nvs_host_unmap(&slab->mapping);
}

/* --- the table --- */

/* False: the table is full. */
static bool slabs_add(const nvs_slab *made)
{
    uint32_t index = 0;
    while (index < slab_count && slabs[index].grains != 0)
        index++;
    if (index == MAX_SLABS)
        return false;
    slabs[index] = *made;
    slab_count = index + 1 > slab_count ? index + 1 : slab_count;
    return true;
}

/* Takes one slab without a grain in use, of at most `most` grains, out of the table. */
static bool slabs_remove_unused(bool pinned, uint64_t most, nvs_slab *out)
{
    for (uint32_t i = 0; i < slab_count; i++) {
        if (slabs[i].grains == 0 || slabs[i].pinned != pinned || slabs[i].free_grains != slabs[i].grains || slabs[i].grains > most)
            continue;
        *out = slabs[i];
        slabs[i] = (nvs_slab){0};
        return true;
    }
    return false;
}

/* Takes up to `grains` free grains, from the first free one on.  `adjacent`: neighbours, all or none. */
static uint32_t take_from(nvs_slab *slab, uint32_t grains, void **out, bool adjacent)
{
    uint32_t got = 0;
    for (uint32_t i = 0; i < slab->grains && got < grains; i++) {
        const bool used = (slab->used[i / 64] >> (i % 64)) & 1;
        if (used && adjacent)
            got = 0;
        if (!used)
            out[got++] = slab->mapping.memory + i * NVS_HOST_GRAIN;
    }
    if (adjacent && got < grains)
        return 0;
    for (uint32_t i = 0; i < got; i++) {
        const uint64_t index = (uint64_t)((char *)out[i] - slab->mapping.memory) / NVS_HOST_GRAIN;
        slab->used[index / 64] |= UINT64_C(1) << (index % 64);
    }
    slab->free_grains -= got;
    return got;
}

/* As many pinned grains must be free.  Neighbours, if one slab has enough of them. */
static void slabs_take(uint32_t grains, void **out)
{
    uint32_t got = 0;
    for (uint32_t i = 0; i < slab_count; i++)
        if (slabs[i].pinned && slabs[i].free_grains >= grains && take_from(&slabs[i], grains, out, true) == grains)
            return;
    for (uint32_t i = 0; i < slab_count && got < grains; i++)
        got += !slabs[i].pinned ? 0 : take_from(&slabs[i], grains - got, out + got, false);
}

static nvs_slab *slab_of(const char *grain, uint64_t *index)
{
    for (uint32_t i = 0; i < slab_count; i++) {
        nvs_slab *slab = &slabs[i];
        *index = (uint64_t)(grain - slab->mapping.memory) / NVS_HOST_GRAIN;
        if (slab->grains != 0 && grain >= slab->mapping.memory && *index < slab->grains)
            return slab;
    }
    return NULL;
}

/* Returns how many were in use. */
static uint32_t slabs_give(uint32_t grains, void *const *taken)
{
    uint32_t given = 0;
    for (uint32_t i = 0; i < grains; i++) {
        uint64_t index;
        nvs_slab *slab = slab_of(taken[i], &index);
        if (slab == NULL)
            continue;
        slab->used[index / 64] &= ~(UINT64_C(1) << (index % 64));
        slab->free_grains++;
        given++;
    }
    return given;
}

static void slabs_context_gone(CUcontext context)
{
    for (uint32_t i = 0; i < slab_count; i++)
        if (slabs[i].registered == context)
            slabs[i].registered = NULL;
}

static NVS_FORK_CODE void slabs_after_fork(void)
{
    memset(slabs, 0, slab_count * sizeof slabs[0]); /* the child has none of the memory (MADV_DONTFORK) */
    slab_count = 0;
}

enum { FIRST_GRAINS = 32, AHEAD_GRAINS = 32, HELPERS = 2 };
enum { TOUCH_REST = 1, PIN_REST = 99 }; /* rest per work, while the program runs: it needs processors, and waits for each registration */
#define IDLE_NS 10000000000u   /* unused memory is freed after this time */
#define LOOK_AGAIN_NS 50000000 /* maximum age of the figure of available memory */

/* All under the lock; "host pool" in the lock order of base/base.h, the innermost. */
NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
NVS_FORK_STATE static uint64_t reserved_bytes, taken_grains;
NVS_FORK_STATE static uint64_t touched_grains, grown_grains; /* there, and to be pinned; pinned */
NVS_FORK_STATE static uint64_t growing_grains; /* on the way to be pinned */
NVS_FORK_STATE static uint64_t announced_grains; /* still needed by a running eviction */
static uint32_t near_gpu;
NVS_FORK_STATE static uint64_t ahead_bytes[NVS_MAX_GPUS]; /* of probable evictions */
NVS_FORK_STATE static uint32_t awaited; /* GPUs whose probable eviction is near, as bits */
NVS_FORK_STATE static bool grow_failed, keeps;
NVS_FORK_STATE static unsigned helpers; /* two, so that one registers while the other touches */
NVS_FORK_STATE static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER; /* one request for a larger share at a time; "host share" in that order */
NVS_FORK_STATE static bool share_known; /* the coordinator has a budget */
NVS_FORK_STATE static uint64_t share_bytes;
NVS_FORK_STATE static uint64_t asked_bytes; /* requested by waiting threads: part of the share until they have reserved it */
NVS_FORK_STATE static uint64_t seen_bytes; /* both, as nvs_host_spare_share saw them last */
NVS_FORK_STATE static uint64_t available_bytes, looked_ns;

/* --- room --- */

/* Locked. */
static bool system_has(uint64_t bytes)
{
    uint64_t now = nvs_now_ns();
    if (looked_ns == 0 || now > looked_ns + LOOK_AGAIN_NS || bytes > available_bytes) {
        const int saved = errno, cancel = nvs_cancel_defer(); /* a cancelled thread would keep the lock */
        available_bytes = nvs_host_system_left();
        nvs_cancel_allow(cancel);
        looked_ns = now;
        errno = saved;
    }
    return bytes <= available_bytes;
}

/* Locked. */
static bool fits_here(uint64_t bytes)
{
    uint64_t sum = reserved_bytes + bytes, made = (touched_grains + grown_grains) * NVS_HOST_GRAIN;
    return sum >= bytes && (nvs_config.host_limit == 0 || sum <= nvs_config.host_limit) && (sum <= made || system_has(sum - made));
}

static uint64_t with_step(uint64_t bytes)
{
    return bytes + (bytes / 2 < NVS_HOST_STEP ? bytes / 2 : NVS_HOST_STEP);
}

/* Reserves if there is room.  On failure: `covered` false, the share is too small; true, the machine has no more. */
static bool take(uint64_t bytes, bool *covered, uint64_t *sum)
{
    pthread_mutex_lock(&lock);
    const bool fits = fits_here(bytes);
    *sum = reserved_bytes + bytes;
    *covered = !fits || !share_known || *sum <= share_bytes;
    if (fits && *covered) {
        reserved_bytes = *sum;
        pthread_cond_broadcast(&changed); /* the target may be higher */
    }
    pthread_mutex_unlock(&lock);
    return fits && *covered;
}

static void count_asked(uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    asked_bytes += bytes;
    pthread_mutex_unlock(&lock);
}

bool nvs_host_reserve(uint64_t bytes)
{
    enum { TRIES = 4 }; /* first with a step, then exactly: other threads may use up the new share */
    bool covered, taken = take(bytes, &covered, &(uint64_t){0});
    if (taken || covered)
        return taken;
    /* One request at a time: one with an older, smaller sum would lower the share of others. */
    pthread_mutex_lock(&asking);
    count_asked(bytes);
    uint64_t sum, asked = 0; /* the last exact request, which was refused */
    for (int i = 0;; i++) {
        taken = take(bytes, &covered, &sum);
        if (taken || covered || sum == asked || i == TRIES)
            break;
        nvs_coordinator.reserve_host(i == 0 ? with_step(sum) : sum);
        asked = i == 0 ? 0 : sum;
    }
    count_asked(-bytes);
    pthread_mutex_unlock(&asking);
    return taken;
}

void nvs_host_unreserve(uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    reserved_bytes -= bytes;
    pthread_mutex_unlock(&lock);
}

void nvs_host_set_share(bool known, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    share_known = known;
    share_bytes = bytes;
    pthread_mutex_unlock(&lock);
}

uint64_t nvs_host_share_in_use(void)
{
    pthread_mutex_lock(&lock);
    uint64_t bytes = reserved_bytes;
    pthread_mutex_unlock(&lock);
    return bytes;
}

bool nvs_host_spare_share(uint64_t *keep)
{
    pthread_mutex_lock(&lock);
    const uint64_t used = reserved_bytes + asked_bytes, enough = used == seen_bytes ? used : with_step(used);
    const bool spare = share_known && share_bytes > used;
    seen_bytes = used;
    *keep = spare && share_bytes > enough ? (share_bytes = enough) : UINT64_MAX;
    pthread_mutex_unlock(&lock);
    return spare;
}

/* --- growing --- */

/* Locked: grains that are needed now. */
static uint64_t demand(void)
{
    return taken_grains + announced_grains;
}

/* Locked: grains that are needed, now or by probable evictions. */
static uint64_t target(void)
{
    uint64_t ahead = 0, all = reserved_bytes / NVS_HOST_GRAIN;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        ahead += (ahead_bytes[gpu] + NVS_HOST_GRAIN - 1) / NVS_HOST_GRAIN;
    ahead = ahead < all ? ahead : all; /* only reserved grains can be taken */
    return ahead > demand() ? ahead : demand();
}

/* Locked; unlocks meanwhile.  Puts a slab into the table, pinned or to be pinned. */
static void add(nvs_slab *slab, bool made, uint64_t *count)
{
    const bool added = made && slabs_add(slab);
    const uint32_t gpu = near_gpu;
    if (made && !added) {
        pthread_mutex_unlock(&lock);
        slab_end(slab, gpu);
        pthread_mutex_lock(&lock);
    }
    grow_failed = !added;
    if (added) {
        *count += slab->grains;
        looked_ns = 0; /* the system has less now */
    }
    pthread_cond_broadcast(&changed);
}

/* Locked; unlocks meanwhile.  Makes one slab of at most `most` of the missing grains, which is not pinned. */
static void touch(uint64_t missing, uint32_t most)
{
    const uint32_t gpu = near_gpu;
    nvs_slab slab;
    pthread_mutex_unlock(&lock);
    const bool made = slab_make(&slab, (uint32_t)(missing < most ? missing : most), gpu, true);
    pthread_mutex_lock(&lock);
    add(&slab, made, &touched_grains);
}

/* Locked; unlocks meanwhile.  Pins one slab: one that is there, else a new one of at most `most` of the missing grains. */
static void grow(uint64_t missing, uint32_t most)
{
    const uint32_t gpu = near_gpu;
    nvs_slab slab;
    const bool there = slabs_remove_unused(false, UINT32_MAX, &slab);
    const uint32_t grains = there ? slab.grains : (uint32_t)(missing < most ? missing : most);
    touched_grains -= there ? grains : 0;
    growing_grains += grains;
    pthread_mutex_unlock(&lock);
    const bool made = there || slab_make(&slab, grains, gpu, false);
    if (made)
        slab_pin(&slab, gpu);
    pthread_mutex_lock(&lock);
    growing_grains -= grains;
    add(&slab, made, &grown_grains);
}

/* Locked; unlocks meanwhile.  Frees one unused slab beyond the target; false: none. */
static bool shrink(void)
{
    const uint64_t made = touched_grains + grown_grains, wanted = target();
    const uint32_t gpu = near_gpu;
    nvs_slab unused;
    if (made <= wanted || (!slabs_remove_unused(false, made - wanted, &unused) && !slabs_remove_unused(true, made - wanted, &unused)))
        return false;
    *(unused.pinned ? &grown_grains : &touched_grains) -= unused.grains;
    pthread_mutex_unlock(&lock);
    slab_end(&unused, gpu);
    pthread_mutex_lock(&lock);
    return true;
}

static void grow_for_demand(void)
{
    /* The first slabs are small, so that the first grains come soon. */
    const uint64_t there = grown_grains + growing_grains;
    grow(demand() - there, there < NVS_SLAB_GRAINS ? FIRST_GRAINS : NVS_SLAB_GRAINS);
}

/* Thread: makes memory for running evictions. */
static void *help(void *nothing)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    pthread_mutex_lock(&lock);
    for (;;) {
        if (demand() > grown_grains + growing_grains && !grow_failed)
            grow_for_demand();
        else
            nvs_cond_wait(&changed, &lock, NULL);
    }
    return NULL;
}

/* Locked.  True when the time has passed. */
static bool wait_for(uint64_t length_ns)
{
    const struct timespec until = nvs_wait_until(length_ns);
    return nvs_cond_wait(&changed, &lock, &until) == ETIMEDOUT;
}

/* Whether the program may submit work, and has since `calls`. */
static bool program_runs(uint32_t gpu, uint64_t calls)
{
    /* Relaxed: it affects only the rests of keep(). */
    return (atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_relaxed) & NVS_GATE_CLOSED) == 0 && nvs_gate_calls(gpu) != calls;
}

static void report(uint32_t gpus)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((gpus >> gpu) & 1)
            nvs_coordinator.memory_changed(gpu);
}

/* Locked; unlocks meanwhile.  Makes one piece for probable evictions, and rests.  All is touched first: only pinning takes driver locks. */
static void grow_ahead(void)
{
    const uint32_t gpu = near_gpu;
    const uint64_t began = nvs_now_ns(), calls = nvs_gate_calls(gpu), made = touched_grains + grown_grains + growing_grains;
    const bool touches = awaited == 0 && target() > made;
    if (touches)
        touch(target() - made, AHEAD_GRAINS);
    else
        grow(target() - grown_grains - growing_grains, awaited != 0 ? NVS_SLAB_GRAINS : AHEAD_GRAINS);
    const uint32_t hurry = awaited; /* perhaps only since the piece was begun */
    if (hurry != 0) {
        if (grow_failed || target() <= grown_grains) {
            pthread_mutex_unlock(&lock);
            report(hurry);
            pthread_mutex_lock(&lock);
        }
        return;
    }
    const uint64_t end = nvs_now_ns() + (touches ? TOUCH_REST : PIN_REST) * (nvs_now_ns() - began);
    for (uint64_t now = began; program_runs(gpu, calls) && (now = nvs_now_ns()) < end && demand() <= grown_grains && awaited == 0;)
        (void)wait_for(end - now);
}

/* Thread: makes memory for probable evictions, and frees unused memory.  Its priority is the program's: on a busy machine a lower one would hold the
 * lock, and so evictions, for seconds. */
static void *keep(void *nothing)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    pthread_mutex_lock(&lock);
    for (bool idle = false;;) {
        const uint64_t before = taken_grains, wanted = target();
        if (demand() <= grown_grains && wanted > grown_grains + growing_grains && !grow_failed) {
            grow_ahead();
            idle = false;
        } else if (touched_grains + grown_grains > wanted && !idle) {
            idle = wait_for(IDLE_NS) && before == taken_grains && wanted == target();
        } else if (touched_grains + grown_grains <= wanted || !shrink()) {
            nvs_cond_wait(&changed, &lock, NULL);
            idle = false;
        }
    }
    return NULL;
}

static bool start_thread(void *(*role)(void *))
{
    return nvs_thread_start(NULL, role, NULL) == 0;
}

/* Locked. */
static void start_helpers(void)
{
    grow_failed = false;
    keeps = keeps || start_thread(keep);
    while (helpers < HELPERS && start_thread(help))
        helpers++;
    pthread_cond_broadcast(&changed);
}

void nvs_host_prepare(uint32_t gpu, uint64_t grains)
{
    pthread_mutex_lock(&lock);
    announced_grains = grains;
    near_gpu = gpu;
    if (demand() > grown_grains)
        start_helpers();
    pthread_mutex_unlock(&lock);
}

void nvs_host_ahead(uint32_t gpu, uint64_t bytes, bool now)
{
    const uint32_t bit = UINT32_C(1) << gpu;
    pthread_mutex_lock(&lock);
    const bool hurries = now && (awaited & bit) == 0;
    awaited = now ? awaited | bit : awaited & ~bit;
    if (ahead_bytes[gpu] != bytes || hurries) {
        ahead_bytes[gpu] = bytes;
        near_gpu = gpu;
        grow_failed = false;
        keeps = keeps || start_thread(keep);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    if (hurries)
        report(bit); /* perhaps it is there */
}

uint64_t nvs_host_ready_bytes(void)
{
    pthread_mutex_lock(&lock);
    const uint64_t grains = grown_grains - taken_grains;
    pthread_mutex_unlock(&lock);
    return grains * NVS_HOST_GRAIN;
}

/* --- taking --- */

/* Locked. */
static bool try_take(uint32_t grains, void **out)
{
    if (grown_grains - taken_grains < grains)
        return false;
    slabs_take(grains, out);
    taken_grains += grains;
    announced_grains -= announced_grains < grains ? announced_grains : grains;
    return true;
}

bool nvs_host_take(uint32_t gpu, uint32_t grains, void **out)
{
    pthread_mutex_lock(&lock);
    bool taken = try_take(grains, out);
    while (!taken) {
        near_gpu = gpu;
        if (announced_grains < grains)
            announced_grains = grains;
        if (demand() > grown_grains && grow_failed)
            break;
        if (helpers == 0)
            start_helpers();
        if (helpers != 0)
            nvs_cond_wait(&changed, &lock, NULL);
        else
            grow_for_demand(); /* no thread could be started */
        taken = try_take(grains, out);
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

void nvs_host_give(uint32_t grains, void *const *taken)
{
    pthread_mutex_lock(&lock);
    taken_grains -= slabs_give(grains, taken);
    if (touched_grains + grown_grains > target())
        pthread_cond_broadcast(&changed); /* starts the idle time of unused memory */
    pthread_mutex_unlock(&lock);
}

void nvs_host_context_gone(CUcontext context)
{
    pthread_mutex_lock(&lock);
    slabs_context_gone(context);
    pthread_mutex_unlock(&lock);
}

NVS_FORK_CODE void nvs_host_after_fork(void)
{
    /* The child has neither the memory (MADV_DONTFORK) nor the threads. */
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&asking, NULL);
    pthread_cond_init(&changed, NULL);
    slabs_after_fork();
    reserved_bytes = touched_grains = grown_grains = taken_grains = announced_grains = 0;
    growing_grains = 0;
    memset(ahead_bytes, 0, sizeof ahead_bytes);
    awaited = 0;
    share_known = keeps = grow_failed = false;
    asked_bytes = seen_bytes = 0;
    share_bytes = 0;
    helpers = 0;
    looked_ns = 0;
}
