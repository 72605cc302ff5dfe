/* Pinned host memory in grains: see host_pool.h for what it promises. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "host_pool.h"

#include "agent.h"
#include "context.h"
#include "cuda_api.h"
#include "log.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SLAB_GRAINS = 128, FIRST_GRAINS = 32, MAX_SLABS = 8192, MAX_TOUCHERS = 8, HELPERS = 2 };
#define IDLE_S 10              /* unused for so long with nobody else on the GPU: given back */
#define LOOK_AGAIN_NS 50000000 /* how old the system's word about free memory may be */

typedef struct slab { /* memory of one growth; never moves while a grain is taken */
    char *memory; /* NULL: none here */
    char *raw;
    size_t raw_bytes;
    uint32_t grains, free_grains;
    CUcontext registered; /* in which it was; NULL: it is not, and copies are slower */
    uint64_t used[SLAB_GRAINS / 64];
} slab;

/* All under the lock; "host pool" in the lock order of base.h, the innermost. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static slab slabs[MAX_SLABS];
static uint32_t slab_count; /* entries that were ever used */
static uint64_t reserved_bytes, grown_grains, taken_grains;
static uint64_t growing_grains; /* that helpers are at */
static uint64_t announced_grains; /* that an eviction under way will take */
static uint32_t near_gpu;
static bool expected, grow_failed;
static unsigned helpers; /* two, so that one registers while the other touches */
static uint64_t available_bytes, looked_ns;

/* --- what the system has left --- */

/* A number behind a word in a small file, or the file's only number when there is no word; UINT64_MAX when it is not there. */
static uint64_t number_in(const char *path, const char *word)
{
    char text[4096];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return UINT64_MAX;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0)
        return UINT64_MAX;
    text[size] = 0;
    const char *at = word != NULL ? strstr(text, word) : text;
    if (at == NULL)
        return UINT64_MAX;
    at += word != NULL ? strlen(word) : 0;
    while (*at == ' ' || *at == ':')
        at++;
    return *at >= '0' && *at <= '9' ? strtoull(at, NULL, 10) : UINT64_MAX;
}

/* What may still be taken so that a tenth stays free. */
static uint64_t ask_system(void)
{
    uint64_t total = number_in("/proc/meminfo", "MemTotal"), left = number_in("/proc/meminfo", "MemAvailable");
    if (total == UINT64_MAX || left == UINT64_MAX)
        return UINT64_MAX;
    uint64_t keep = total / 10;
    left = left > keep ? (left - keep) * 1024 : 0;
    uint64_t bound = number_in("/sys/fs/cgroup/memory.max", NULL), used = number_in("/sys/fs/cgroup/memory.current", NULL);
    if (bound != UINT64_MAX && used != UINT64_MAX) {
        uint64_t usable = bound - bound / 10;
        uint64_t of_group = usable > used ? usable - used : 0;
        left = of_group < left ? of_group : left;
    }
    return left;
}

/* Locked. */
static bool system_has(uint64_t bytes)
{
    uint64_t now = nvs_now_ns();
    if (looked_ns == 0 || now > looked_ns + LOOK_AGAIN_NS || bytes > available_bytes) {
        int saved = errno; /* the application's */
        available_bytes = ask_system();
        looked_ns = now;
        errno = saved;
    }
    return bytes <= available_bytes;
}

bool nvs_host_reserve(uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    uint64_t sum = reserved_bytes + bytes, grown = grown_grains * NVS_HOST_GRAIN;
    bool granted = sum >= bytes && (nvs_config.host_limit == 0 || sum <= nvs_config.host_limit) &&
                   (sum <= grown || system_has(sum - grown));
    if (granted) {
        reserved_bytes = sum;
        if (expected)
            pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return granted;
}

void nvs_host_unreserve(uint64_t bytes)
{
    pthread_mutex_lock(&lock);
    reserved_bytes -= bytes;
    pthread_mutex_unlock(&lock);
}

/* --- growing --- */

typedef struct stretch {
    char *from, *to;
} stretch;

static void *touch(void *argument)
{
    const stretch *mine = argument;
    for (volatile char *at = mine->from; at < mine->to; at += 4096)
        *at = 0;
    return NULL;
}

/* The first touch is what takes the time: by several threads, each its own part. */
static void touch_all(char *memory, size_t bytes)
{
    stretch parts[MAX_TOUCHERS];
    pthread_t threads[MAX_TOUCHERS];
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned count = bytes < (32u << 20) || processors < 2 ? 1 : processors > MAX_TOUCHERS ? MAX_TOUCHERS : (unsigned)processors;
    unsigned started = 0;
    size_t share = (bytes / count + 4095) / 4096 * 4096;
    for (unsigned i = 0; i < count; i++) {
        char *from = memory + i * share, *end = memory + bytes;
        parts[i] = (stretch){from < end ? from : end, i + 1 < count && from + share < end ? from + share : end};
    }
    while (started + 1 < count && pthread_create(&threads[started], NULL, touch, &parts[started]) == 0)
        started++;
    for (unsigned i = started; i < count; i++)
        touch(&parts[i]);
    while (started > 0)
        pthread_join(threads[--started], NULL);
}

/* Near the GPU, where the system has several memories; a preference only. */
static void bind_near(char *memory, size_t bytes, uint32_t gpu)
{
    enum { PREFERRED = 1 }; /* MPOL_PREFERRED */
    char id[32], path[96];
    if (NVS_REAL(cuDeviceGetPCIBusId)(id, sizeof id, (CUdevice)gpu) != CUDA_SUCCESS)
        return;
    id[sizeof id - 1] = 0;
    for (char *at = id; *at != 0; at++)
        *at = *at >= 'A' && *at <= 'F' ? (char)(*at - 'A' + 'a') : *at;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", id);
    uint64_t node = number_in(path, NULL);
    if (node >= 64)
        return;
    unsigned long mask = 1ul << node;
    (void)syscall(SYS_mbind, memory, bytes, PREFERRED, &mask, 8 * sizeof mask, 0);
}

typedef struct registration {
    void *memory;
    size_t bytes;
    CUcontext in;
} registration;

static bool register_in(CUcontext context, void *argument)
{
    registration *r = argument;
    CUcontext ignored;
    if (NVS_REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true;
    CUresult result = NVS_REAL(cuMemHostRegister_v2)(r->memory, r->bytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        r->in = context;
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, "host memory cannot be pinned (error %d): evictions will be slow", (int)result);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

static bool unregister_in(CUcontext context, void *argument)
{
    registration *r = argument;
    CUcontext ignored;
    if (context != r->in || NVS_REAL(cuCtxPushCurrent_v2)(context) != CUDA_SUCCESS)
        return true;
    NVS_REAL(cuMemHostUnregister)(r->memory);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

/* Unlocked.  A slab of so many grains, ready for use. */
static bool make_slab(slab *out, uint32_t grains, uint32_t gpu)
{
    size_t bytes = grains * NVS_HOST_GRAIN, raw_bytes = bytes + NVS_HOST_GRAIN;
    char *raw = mmap(NULL, raw_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return false;
    uintptr_t aligned = ((uintptr_t)raw + NVS_HOST_GRAIN - 1) & ~(uintptr_t)(NVS_HOST_GRAIN - 1);
    char *memory = raw + (aligned - (uintptr_t)raw);
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    (void)madvise(memory, bytes, MADV_DONTFORK);
    bind_near(memory, bytes, gpu);
    touch_all(memory, bytes);
    registration r = {memory, bytes, NULL};
    nvs_each_context(gpu, register_in, &r);
    *out = (slab){.memory = memory, .raw = raw, .raw_bytes = raw_bytes, .grains = grains, .free_grains = grains, .registered = r.in};
    return true;
}

static void end_slab(const slab *of, uint32_t gpu)
{
    registration r = {of->memory, of->grains * NVS_HOST_GRAIN, of->registered};
    if (of->registered != NULL)
        nvs_each_context(gpu, unregister_in, &r);
    munmap(of->raw, of->raw_bytes);
}

/* Locked: how many grains there should be. */
static uint64_t target(void)
{
    uint64_t demand = taken_grains + announced_grains, all = reserved_bytes / NVS_HOST_GRAIN;
    return expected && all > demand ? all : demand;
}

/* Locked; unlocks meanwhile.  One step towards the target. */
static void grow(void)
{
    uint64_t missing = target() - grown_grains - growing_grains;
    uint32_t most = grown_grains + growing_grains < SLAB_GRAINS ? FIRST_GRAINS : SLAB_GRAINS; /* the first ones are soon there */
    uint32_t grains = (uint32_t)(missing < most ? missing : most), gpu = near_gpu, index = 0;
    slab made;
    growing_grains += grains;
    pthread_mutex_unlock(&lock);
    bool done = make_slab(&made, grains, gpu);
    pthread_mutex_lock(&lock);
    growing_grains -= grains;
    while (index < MAX_SLABS && slabs[index].memory != NULL)
        index++;
    if (done && index == MAX_SLABS) {
        munmap(made.raw, made.raw_bytes);
        done = false;
    }
    grow_failed = !done;
    if (done) {
        slabs[index] = made;
        slab_count = index + 1 > slab_count ? index + 1 : slab_count;
        grown_grains += grains;
        looked_ns = 0; /* the system has less now */
    }
    pthread_cond_broadcast(&changed);
}

/* Locked; unlocks meanwhile.  Gives one slab back that nobody uses; false when there is none. */
static bool shrink(void)
{
    for (uint32_t i = 0; i < slab_count; i++) {
        slab of = slabs[i];
        if (of.memory == NULL || of.free_grains != of.grains)
            continue;
        slabs[i] = (slab){0};
        grown_grains -= of.grains;
        uint32_t gpu = near_gpu;
        pthread_mutex_unlock(&lock);
        end_slab(&of, gpu);
        pthread_mutex_lock(&lock);
        return true;
    }
    return false;
}

static void *help(void *nothing)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    pthread_mutex_lock(&lock);
    for (bool idle = false;;) {
        if (target() > grown_grains + growing_grains && !grow_failed) {
            grow();
            idle = false;
        } else if (idle && !expected && shrink()) {
            continue;
        } else if (!expected && grown_grains > target()) {
            struct timespec until;
            clock_gettime(CLOCK_REALTIME, &until);
            until.tv_sec += IDLE_S;
            uint64_t before = taken_grains;
            idle = pthread_cond_timedwait(&changed, &lock, &until) == ETIMEDOUT && before == taken_grains;
        } else {
            pthread_cond_wait(&changed, &lock);
            idle = false;
        }
    }
    return NULL;
}

/* Locked. */
static void have_helper(void)
{
    sigset_t all, before;
    pthread_t thread;
    grow_failed = false;
    while (helpers < HELPERS) {
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        bool runs = pthread_create(&thread, NULL, help, NULL) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!runs)
            break;
        helpers++;
        pthread_detach(thread);
    }
    pthread_cond_broadcast(&changed);
}

void nvs_host_prepare(uint32_t gpu, uint64_t grains)
{
    pthread_mutex_lock(&lock);
    announced_grains = grains;
    near_gpu = gpu;
    if (target() > grown_grains)
        have_helper();
    pthread_mutex_unlock(&lock);
}

void nvs_host_expect(uint32_t gpu, bool likely)
{
    pthread_mutex_lock(&lock);
    if (expected != likely) {
        expected = likely;
        near_gpu = gpu;
        if (likely && reserved_bytes != 0)
            have_helper();
        else
            pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
}

/* --- taking --- */

/* Locked.  Up to so many free grains of a slab from its first free one on, in a row. */
static uint32_t take_from(slab *of, uint32_t grains, void **out, bool in_a_row)
{
    uint32_t got = 0;
    for (uint32_t i = 0; i < of->grains && got < grains; i++) {
        bool used = (of->used[i / 64] >> (i % 64)) & 1;
        if (used && in_a_row)
            got = 0;
        if (!used)
            out[got++] = of->memory + i * NVS_HOST_GRAIN;
    }
    if (in_a_row && got < grains)
        return 0;
    for (uint32_t i = 0; i < got; i++) {
        uint64_t index = (uint64_t)((char *)out[i] - of->memory) / NVS_HOST_GRAIN;
        of->used[index / 64] |= UINT64_C(1) << (index % 64);
    }
    of->free_grains -= got;
    taken_grains += got;
    announced_grains -= announced_grains < got ? announced_grains : got;
    return got;
}

/* Locked. */
static bool try_take(uint32_t grains, void **out)
{
    uint32_t got = 0;
    if (grown_grains - taken_grains < grains)
        return false;
    for (uint32_t i = 0; i < slab_count; i++)
        if (slabs[i].memory != NULL && slabs[i].free_grains >= grains && take_from(&slabs[i], grains, out, true) == grains)
            return true;
    for (uint32_t i = 0; i < slab_count && got < grains; i++)
        if (slabs[i].memory != NULL && slabs[i].free_grains != 0)
            got += take_from(&slabs[i], grains - got, out + got, false);
    return got == grains; /* there are enough: see above */
}

bool nvs_host_take(uint32_t gpu, uint32_t grains, void **out)
{
    pthread_mutex_lock(&lock);
    bool taken = try_take(grains, out);
    while (!taken) {
        near_gpu = gpu;
        if (announced_grains < grains)
            announced_grains = grains;
        if (target() > grown_grains && grow_failed)
            break;
        if (helpers == 0)
            have_helper();
        if (helpers != 0)
            pthread_cond_wait(&changed, &lock);
        else
            grow(); /* no thread to be had: by ourselves */
        taken = try_take(grains, out);
    }
    pthread_mutex_unlock(&lock);
    return taken;
}

void nvs_host_give(uint32_t grains, void *const *taken)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < grains; i++)
        for (uint32_t s = 0; s < slab_count; s++) {
            slab *of = &slabs[s];
            uint64_t offset = (uint64_t)((char *)taken[i] - of->memory);
            if (of->memory == NULL || (char *)taken[i] < of->memory || offset >= of->grains * NVS_HOST_GRAIN)
                continue;
            uint64_t index = offset / NVS_HOST_GRAIN;
            of->used[index / 64] &= ~(UINT64_C(1) << (index % 64));
            of->free_grains++;
            taken_grains--;
            break;
        }
    if (helpers != 0 && !expected)
        pthread_cond_broadcast(&changed); /* time begins to run for what is unused */
    pthread_mutex_unlock(&lock);
}

uint64_t nvs_host_taken_bytes(void)
{
    pthread_mutex_lock(&lock);
    uint64_t bytes = taken_grains * NVS_HOST_GRAIN;
    pthread_mutex_unlock(&lock);
    return bytes;
}

void nvs_host_context_gone(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (uint32_t i = 0; i < slab_count; i++)
        if (slabs[i].registered == context)
            slabs[i].registered = NULL;
    pthread_mutex_unlock(&lock);
}

void nvs_host_after_fork(void)
{
    /* The memory was not copied to the child (MADV_DONTFORK); the helper does not exist here. */
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&changed, NULL);
    memset(slabs, 0, sizeof slabs);
    slab_count = 0;
    reserved_bytes = grown_grains = taken_grains = announced_grains = 0;
    growing_grains = 0;
    expected = grow_failed = false;
    helpers = 0;
    looked_ns = 0;
}
