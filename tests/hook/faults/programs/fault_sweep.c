/* One after the other, everything that the hook asks for fails: fault_sweep driver CODE | host | host-first NTH
 *
 * The same scene of allocations, captures, graphs, copies, launches and contexts is played again and again, on a thread of
 * its own each time.  `driver`: the nth call of each driver function that it makes, by the hook's hand or by the program's own,
 * returns CODE; and then all of them do.  `host`: the nth request of the hook's to the system fails (malloc and its kin, mmap,
 * new threads, eventfds and sockets), then each from the nth on.
 * `host-first`: the nth since the program began, before the driver was initialised; says `unused` if there are not that many.
 *
 * What a call says must be success or the fault's own error (any, where a function fails for good), and no success if it was the
 * very function called that failed.  After
 * each scene what is left is given back without faults, the hook's figures and the driver's are what they were before, and the
 * GPU works.  A line for each thing that is not so; `good` at the end if there was none.
 */
#define _GNU_SOURCE /* dl_iterate_phdr */
#include <cuda.h>

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "host_faults.h"
#include "simulated_gpu.h"

#define MIB ((size_t)1 << 20)
enum { NAMES = 256, HELD = 64 };

static unsigned complaints;
static const char *failing = "nothing"; /* what the present scene is about */
static unsigned failing_nth;
static bool persistent;     /* it fails for good, so that what comes later may fail for other reasons */
static int code;            /* CUresult of the fault */

static void complain(int line, const char *call, int said)
{
    printf("line %d: %s says %d when %s fails at call %u with %d\n", line, call, said, failing, failing_nth, code);
    fflush(stdout);
    complaints++;
}

/* --- what the driver is called for --- */

typedef struct counted {
    char name[64];
    unsigned calls;
} counted;

static counted calls_of[NAMES];
static unsigned name_count;
static _Thread_local const char *calling; /* the call that the program makes, as it stands in the source */
static _Thread_local bool must_hear;

/* Whether a driver's function is the one that a text begins with, whatever its version and its default stream. */
static bool is_call_of(const char *text, const char *function)
{
    const size_t length = strcspn(text, "(");
    return strncmp(text, function, length) == 0 && (function[length] == 0 || function[length] == '_');
}

/* In mode `swap` the program's handles are the hook's own, which asks the driver once more. */
static bool is_kept_from_the_program(const char *function)
{
    const char *mode = getenv("NVSHARE_MEMORY");
    return mode != NULL && strcmp(mode, "swap") == 0 && (strcmp(function, "cuMemCreate") == 0 || strcmp(function, "cuMemRelease") == 0);
}

static void seen(const char *function)
{
    unsigned at = 0;
    while (at < name_count && strcmp(calls_of[at].name, function) != 0)
        at++;
    if (at == name_count && name_count < NAMES)
        snprintf(calls_of[name_count++].name, sizeof calls_of[0].name, "%s", function);
    calls_of[at].calls++;
    if (calling != NULL && strcmp(function, failing) == 0 && (persistent || calls_of[at].calls == failing_nth) &&
        is_call_of(calling, function) && !is_kept_from_the_program(function))
        must_hear = true;
}

#define TRY(call) tried(__LINE__, #call, (calling = #call, must_hear = false, (call)))

static bool tried(int line, const char *call, CUresult said)
{
    calling = NULL;
    if (said != CUDA_SUCCESS ? (int)said != code && !persistent : must_hear)
        complain(line, call, (int)said);
    return said == CUDA_SUCCESS;
}

/* --- what a scene holds, and gives back --- */

enum kind { MEMORY, ORDERED, HOST, ARRAY, HANDLE, MAPPING, RANGE, STREAM, EVENT, POOL, GRAPH, EXECUTABLE, CONTEXT };
typedef struct thing {
    enum kind kind;
    uint64_t what, with;
} thing;

static thing held[HELD];
static unsigned held_count;

static void hold(enum kind kind, uint64_t what, uint64_t with)
{
    if (held_count == HELD)
        abort();
    held[held_count++] = (thing){kind, what, with};
}

static bool give_back(const thing *one)
{
    switch (one->kind) {
    case MEMORY: return TRY(cuMemFree(one->what));
    case ORDERED: return TRY(cuMemFreeAsync(one->what, (CUstream)one->with));
    case HOST: return TRY(cuMemFreeHost((void *)one->what));
    case ARRAY: return TRY(cuArrayDestroy((CUarray)one->what));
    case HANDLE: return TRY(cuMemRelease(one->what));
    case MAPPING: return TRY(cuMemUnmap(one->what, one->with));
    case RANGE: return TRY(cuMemAddressFree(one->what, one->with));
    case STREAM: return TRY(cuStreamDestroy((CUstream)one->what));
    case EVENT: return TRY(cuEventDestroy((CUevent)one->what));
    case POOL: return TRY(cuMemPoolDestroy((CUmemoryPool)one->what));
    case GRAPH: return TRY(cuGraphDestroy((CUgraph)one->what));
    case EXECUTABLE: return TRY(cuGraphExecDestroy((CUgraphExec)one->what));
    case CONTEXT: return TRY(cuCtxDestroy((CUcontext)one->what));
    }
    return false;
}

/* The newest first; what could not be given back stays. */
static void give_all_back(void)
{
    thing left[HELD];
    unsigned left_count = 0;
    while (held_count > 0) {
        const thing one = held[--held_count];
        if (!give_back(&one) && (one.kind != MAPPING || !give_back(&one))) /* else its range could not be freed */
            left[left_count++] = one;
    }
    while (left_count > 0)
        held[held_count++] = left[--left_count];
}

/* --- the scene --- */

static CUcontext primary;
static CUfunction busy;

static CUresult launch(CUstream stream, uint64_t ns)
{
    void *parameters[] = {&ns};
    return cuLaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, stream, parameters, NULL);
}

static void CUDA_CB nothing(void *data) { (void)data; }

#include "fault_scene.h"

static void *play(void *unused)
{
    (void)unused;
    scene();
    give_all_back();
    return NULL;
}

static void *clean_up(void *unused)
{
    (void)unused;
    if (TRY(cuCtxSetCurrent(primary))) {
        for (unsigned i = 0; i < held_count; i++)
            if (held[i].kind == ORDERED)
                held[i].kind = MEMORY; /* its stream may be gone */
        give_all_back();
        (void)TRY(cuCtxSynchronize());
    }
    if (held_count > 0)
        complain(__LINE__, "giving back without a fault", (int)held[0].kind);
    held_count = 0;
    return NULL;
}

static void on_a_thread(void *(*body)(void *))
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, body, NULL) != 0 || pthread_join(thread, NULL) != 0)
        abort();
}

/* --- what must be as before --- */

typedef struct figures {
    size_t free_bytes, total_bytes;
    uint64_t fixed_bytes, paged_bytes;
} figures;

static nvs_sim_shared *shared;

static bool map_state(void)
{
    const char *state = getenv("NVSHARE_SIM_STATE");
    const int file = state != NULL ? open(state, O_RDONLY) : -1;
    shared = file >= 0 ? mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0) : MAP_FAILED;
    return shared != MAP_FAILED;
}

static figures look(void)
{
    figures now = {0};
    (void)TRY(cuDeviceGraphMemTrim(0)); /* what the driver keeps for graphs is nobody's */
    (void)TRY(cuMemGetInfo(&now.free_bytes, &now.total_bytes));
    for (unsigned i = 0; i < NVS_SIM_MAX_PROCESSES; i++)
        if (shared->processes[i].process_id == (uint32_t)getpid()) {
            now.fixed_bytes = shared->processes[i].fixed_bytes[0];
            now.paged_bytes = shared->processes[i].paged_bytes[0];
        }
    return now;
}

static void check(const figures *before)
{
    CUdeviceptr memory;
    uint32_t word = 0;
    const figures now = look();
    if (memcmp(&now, before, sizeof now) != 0) {
        printf("free %zd, driver %lld + %lld bytes after %s failed at call %u with %d\n",
               (ssize_t)(now.free_bytes - before->free_bytes), (long long)(now.fixed_bytes - before->fixed_bytes),
               (long long)(now.paged_bytes - before->paged_bytes), failing, failing_nth, code);
        complaints++;
    }
    if (!TRY(cuMemAlloc(&memory, 4096)))
        return;
    (void)TRY(cuMemsetD32(memory, 0x600dda7a, 1024));
    (void)TRY(launch(NULL, 1000));
    (void)TRY(cuMemcpyDtoH(&word, memory + 400, sizeof word));
    (void)TRY(cuMemFree(memory));
    if (word != 0x600dda7a)
        complain(__LINE__, "reading memory", (int)word);
}

static void begin(void)
{
    static const char image[] = ".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry nvs_busy(.param .u64 ns) { ret; }\n";
    CUmodule module;
    if (TRY(cuInit(0)) && TRY(cuDevicePrimaryCtxRetain(&primary, 0)) && TRY(cuCtxSetCurrent(primary)) &&
        TRY(cuModuleLoadData(&module, image)) && TRY(cuModuleGetFunction(&busy, module, "nvs_busy")) && map_state())
        return;
    printf("the driver cannot be used\n");
    exit(1);
}

/* One scene with one fault, and what it left behind. */
static void faulty(const figures *before)
{
    on_a_thread(play);
    nvs_sim_clear_faults();
    host_to = 0;
    const char *what = failing;
    failing = "nothing"; /* nobody need hear of it any more */
    persistent = false;
    const int heard = code;
    code = CUDA_SUCCESS;
    on_a_thread(clean_up);
    code = heard;
    failing = what;
    check(before);
}

static figures settled(void)
{
    for (int i = 0; i < 2; i++) { /* the first scene of all leaves behind what is made once */
        on_a_thread(play);
        on_a_thread(clean_up);
    }
    return look();
}

/* A capture that never ends; memory that the driver does not take back; memory of a context that cannot be known. */
static bool leaves_nobody_a_way(const char *function)
{
    return strcmp(function, "cuStreamEndCapture") == 0 || strcmp(function, "cuMemRelease") == 0 ||
           strcmp(function, "cuMemUnmap") == 0 || strcmp(function, "cuCtxGetCurrent") == 0;
}

static void sweep_driver(void)
{
    counted all[NAMES];
    unsigned scenes = 0;
    begin();
    const figures before = settled();
    nvs_sim_observe(seen);
    on_a_thread(play);
    const unsigned count = name_count;
    memcpy(all, calls_of, sizeof all);
    for (unsigned i = 0; i < count; i++)
        for (unsigned nth = 0; nth <= all[i].calls; nth++, scenes++) {
            persistent = nth == 0;
            if (persistent && leaves_nobody_a_way(all[i].name))
                continue;
            name_count = 0;
            memset(calls_of, 0, sizeof calls_of);
            failing = all[i].name;
            failing_nth = nth;
            nvs_sim_fail(all[i].name, nth, code);
            faulty(&before);
        }
    nvs_sim_observe(NULL);
    printf("%u functions, %u scenes\n", count, scenes);
}

static void sweep_host(void)
{
    unsigned scenes = 0;
    begin();
    const figures before = settled();
    host_calls = 0;
    on_a_thread(play);
    const unsigned count = host_calls;
    failing = "an allocation of the hook";
    for (unsigned nth = 1; nth <= count; nth++)
        for (unsigned each = 0; each < 2; each++, scenes++) {
            failing_nth = host_from = nth;
            host_calls = 0;
            host_to = each ? UINT32_MAX : nth;
            faulty(&before);
        }
    printf("%u allocations, %u scenes\n", count, scenes);
}

/* Descriptors of the only kind that a hook holds which has no connection. */
static int eventfds(void)
{
    int found = 0;
    DIR *all = opendir("/proc/self/fd");
    for (const struct dirent *one = NULL; all != NULL && (one = readdir(all)) != NULL;) {
        char kind[32] = "";
        found += readlinkat(dirfd(all), one->d_name, kind, sizeof kind - 1) > 0 && strcmp(kind, "anon_inode:[eventfd]") == 0;
    }
    return all != NULL && closedir(all) == 0 ? found : -1;
}

static bool host_first(unsigned nth)
{
    int (*active)(void) = NULL;
    *(void **)&active = dlsym(RTLD_DEFAULT, "nvshare_active");
    failing = "an allocation of the hook";
    failing_nth = host_from = host_to = nth;
    begin();
    on_a_thread(play);
    const bool hit = host_calls >= nth;
    host_to = 0;
    on_a_thread(clean_up);
    const figures before = settled();
    on_a_thread(play);
    check(&before);
    if (active != NULL && eventfds() != (active() > 0))
        complain(__LINE__, "what the hook holds", eventfds());
    return hit;
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    const int number = argc > 2 ? atoi(argv[2]) : 0;
    bool hit = true;
    dl_iterate_phdr(enter_hook, NULL);
    if (replaced < 5 && getenv("PLAIN") == NULL)
        return 2;
    code = CUDA_ERROR_OUT_OF_MEMORY;
    if (strcmp(what, "driver") == 0) {
        code = number;
        sweep_driver();
    } else if (strcmp(what, "host") == 0) {
        sweep_host();
    } else {
        hit = host_first((unsigned)number);
    }
    puts(!hit ? "unused" : complaints == 0 ? "good" : "bad");
    return complaints != 0;
}
