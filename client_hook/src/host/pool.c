/* See pool.h. */
#include "host/pool.h"

#include "base/clock.h"
#include "base/config.h"
#include "base/log.h"
#include "base/port.h"
#include "base/process/cancel.h"
#include "base/process/thread.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "host/left.h"
#include "host/slab.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

enum { FIRST_GRAINS = 32, AHEAD_GRAINS = 8, HELPERS = 2 };
enum { REST_FACTOR = 9 };      /* rest per work: a tenth of one thread's time, while the program may run */
#define IDLE_NS 10000000000u   /* unused memory is freed after this time */
#define LOOK_AGAIN_NS 50000000 /* maximum age of the figure of available memory */

/* All under the lock; "host pool" in the lock order of base/base.h, the innermost. */
NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
NVS_FORK_STATE static uint64_t reserved_bytes, grown_grains, taken_grains;
NVS_FORK_STATE static uint64_t growing_grains; /* being made */
NVS_FORK_STATE static uint64_t announced_grains; /* still needed by a running eviction */
static uint32_t near_gpu;
NVS_FORK_STATE static uint64_t ahead_bytes[NVS_MAX_GPUS]; /* of probable evictions */
NVS_FORK_STATE static bool grow_failed, keeps;
NVS_FORK_STATE static unsigned helpers; /* two, so that one registers while the other touches */
NVS_FORK_STATE static pthread_mutex_t asking = PTHREAD_MUTEX_INITIALIZER; /* one request for a larger share at a time; "host share" in that order */
NVS_FORK_STATE static bool share_known; /* the coordinator has a budget */
NVS_FORK_STATE static uint64_t share_bytes;
NVS_FORK_STATE static uint64_t asked_bytes; /* requested by waiting threads: part of the share until they have reserved it */
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
    uint64_t sum = reserved_bytes + bytes, grown = grown_grains * NVS_HOST_GRAIN;
    return sum >= bytes && (nvs_config.host_limit == 0 || sum <= nvs_config.host_limit) && (sum <= grown || system_has(sum - grown));
}

static uint64_t whole_steps(uint64_t bytes)
{
    return (bytes + NVS_HOST_STEP - 1) / NVS_HOST_STEP * NVS_HOST_STEP;
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
    enum { TRIES = 4 }; /* first in whole steps, then exactly: other threads may use up the new share */
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
        nvs_coordinator.reserve_host(i == 0 ? whole_steps(sum) : sum);
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
    uint64_t bytes = whole_steps(reserved_bytes);
    pthread_mutex_unlock(&lock);
    return bytes;
}

bool nvs_host_spare_share(uint64_t *out)
{
    pthread_mutex_lock(&lock);
    uint64_t keep = whole_steps(reserved_bytes + asked_bytes);
    bool spare = share_known && share_bytes >= keep + 2 * NVS_HOST_STEP; /* one step is kept for the next allocation */
    if (spare)
        *out = share_bytes = keep + NVS_HOST_STEP;
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

/* Locked; unlocks meanwhile.  Makes one slab of at most `most` grains, towards `wanted` grains in all. */
static void grow(uint64_t wanted, uint32_t most, bool gently)
{
    const uint64_t missing = wanted - grown_grains - growing_grains;
    const uint32_t grains = (uint32_t)(missing < most ? missing : most), gpu = near_gpu;
    nvs_slab made;
    growing_grains += grains;
    pthread_mutex_unlock(&lock);
    const bool done = nvs_slab_make(&made, grains, gpu, gently);
    pthread_mutex_lock(&lock);
    const bool added = done && nvs_slabs_add(&made);
    if (done && !added) {
        pthread_mutex_unlock(&lock);
        nvs_slab_end(&made, gpu);
        pthread_mutex_lock(&lock);
    }
    growing_grains -= grains;
    grow_failed = !added;
    if (added) {
        grown_grains += grains;
        looked_ns = 0; /* the system has less now */
    }
    pthread_cond_broadcast(&changed);
}

static void grow_for_demand(void)
{
    /* The first slabs are small, so that the first grains come soon. */
    grow(demand(), grown_grains + growing_grains < NVS_SLAB_GRAINS ? FIRST_GRAINS : NVS_SLAB_GRAINS, false);
}

/* Locked; unlocks meanwhile.  Frees one unused slab beyond the target; false: none. */
static bool shrink(void)
{
    const uint64_t wanted = target();
    const uint32_t gpu = near_gpu;
    nvs_slab unused;
    if (grown_grains <= wanted || !nvs_slabs_remove_unused(grown_grains - wanted, &unused))
        return false;
    grown_grains -= unused.grains;
    pthread_mutex_unlock(&lock);
    nvs_slab_end(&unused, gpu);
    pthread_mutex_lock(&lock);
    return true;
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

static bool program_may_run(uint32_t gpu)
{
    /* Relaxed: it affects only the rests of keep(). */
    return (atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_relaxed) & NVS_GATE_CLOSED) == 0;
}

/* Locked.  Makes one piece for probable evictions, and rests. */
static void grow_ahead(void)
{
    uint64_t began = nvs_now_ns();
    const uint32_t gpu = near_gpu;
    grow(target(), AHEAD_GRAINS, true);
    uint64_t end = nvs_now_ns() + REST_FACTOR * (nvs_now_ns() - began);
    for (uint64_t now = began; program_may_run(gpu) && (now = nvs_now_ns()) < end && demand() <= grown_grains;)
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
        } else if (grown_grains > wanted && !idle) {
            idle = wait_for(IDLE_NS) && before == taken_grains && wanted == target();
        } else if (grown_grains <= wanted || !shrink()) {
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

void nvs_host_ahead(uint32_t gpu, uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    if (ahead_bytes[gpu] != bytes) {
        ahead_bytes[gpu] = bytes;
        near_gpu = gpu;
        grow_failed = false;
        keeps = keeps || start_thread(keep);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}

/* --- taking --- */

/* Locked. */
static bool try_take(uint32_t grains, void **out)
{
    if (grown_grains - taken_grains < grains)
        return false;
    nvs_slabs_take(grains, out);
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
    taken_grains -= nvs_slabs_give(grains, taken);
    if (grown_grains > target())
        pthread_cond_broadcast(&changed); /* starts the idle time of unused memory */
    pthread_mutex_unlock(&lock);
}

void nvs_host_context_gone(CUcontext context)
{
    pthread_mutex_lock(&lock);
    nvs_slabs_context_gone(context);
    pthread_mutex_unlock(&lock);
}

NVS_FORK_CODE void nvs_host_after_fork(void)
{
    /* The child has neither the memory (MADV_DONTFORK) nor the threads. */
    pthread_mutex_init(&lock, NULL);
    pthread_mutex_init(&asking, NULL);
    pthread_cond_init(&changed, NULL);
    nvs_slabs_after_fork();
    reserved_bytes = grown_grains = taken_grains = announced_grains = 0;
    growing_grains = 0;
    memset(ahead_bytes, 0, sizeof ahead_bytes);
    share_known = keeps = grow_failed = false;
    asked_bytes = 0;
    share_bytes = 0;
    helpers = 0;
    looked_ns = 0;
}
