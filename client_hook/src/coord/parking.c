/* Parking: the program's calls stop before the driver while the coordinator has its process off the GPUs (engine/parking/parking.py).
 *
 * The driver's checkpoint first locks the process: from then on calls that submit work or change something wait in the driver until the process is
 * unlocked.  Measured with driver 580: queries of events and streams, and waits for them, are not stopped.  They read memory of the card that the
 * checkpoint takes away, and the process ends by SIGSEGV.  cuMemGetInfo fails.  So before the checkpoint
 * - the hook closes the gate of those calls (nvs_query_enter in gate/gate.h): each is over, and later ones wait for a lease;
 * - threads at the gate of submissions wait for a lease as always.  A request for a lease is what wakes a parked program.
 *
 * A thread may wait inside the driver, in a call that the hook does not wrap: it has asked for nothing.  All such threads wait on the condition
 * variable of the driver's lock.  A thread of the hook, the *probe*, makes a harmless call that waits there too.  The agent compares the address of its
 * futex, as the kernel shows it, with those of the program's threads, ten times a second, and asks for a lease in their place.
 *
 * Non-goals: messages (loop.c), the checkpoint itself, which another process makes.
 */
#define _GNU_SOURCE /* gettid */
#include "coord/parking.h"

#include "base/hot.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "coord/lease.h"
#include "coord/mailbox.h"
#include "coord/protocol/link.h"
#include "coord/protocol/wire.gen.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "inflight/captures.h"
#include "nvshare.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOOK_NS 100000000u   /* between two looks at the threads */
#define PROBE_NS 20000000u   /* between two calls of the probe, until one waits */
#define CLOSING_NS 20000000u /* for calls that are inside */

static bool closed;              /* agent thread */
static uint64_t look_at_ns;      /* agent thread */
static _Atomic uint32_t probing; /* futex: 1 while the probe is to call */
static _Atomic int32_t probe;    /* its thread id; 0: there is none */

/* --- the threads, as the kernel shows them --- */

static bool read_task(const char *thread, const char *file, char *into, size_t size)
{
    char path[512]; /* d_name may have 255 characters, for the compiler */
    (void)snprintf(path, sizeof path, "/proc/self/task/%s/%s", thread, file);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    const ssize_t got = read(fd, into, size - 1);
    close(fd);
    into[got > 0 ? got : 0] = '\0';
    return got > 0;
}

/* The condition variable, or other pair of words, whose futex the thread waits for; 0: it waits for none. */
static uint64_t waits_at(const char *thread)
{
    char line[256];
    if (!read_task(thread, "syscall", line, sizeof line))
        return 0;
    char *end;
    const long number = strtol(line, &end, 10);
    return end != line && number == SYS_futex ? strtoull(end, NULL, 16) & ~(uint64_t)7 : 0;
}

static bool threads_are_shown(void)
{
    char thread[16], line[256];
    (void)snprintf(thread, sizeof thread, "%d", (int)syscall(SYS_gettid));
    return read_task(thread, "syscall", line, sizeof line) && (line[0] == 'r' || (line[0] >= '0' && line[0] <= '9')); /* "running", or a number */
}

/* A thread of the program waits where the probe does. */
static bool a_thread_waits(void)
{
    char own[16], name[32];
    (void)snprintf(own, sizeof own, "%d", (int)atomic_load_explicit(&probe, memory_order_acquire)); /* pairs with the probe's store */
    const uint64_t place = waits_at(own);
    DIR *threads = place != 0 ? opendir("/proc/self/task") : NULL;
    bool found = false;
    if (threads == NULL)
        return false;
    for (const struct dirent *at; !found && (at = readdir(threads)) != NULL;)
        found = at->d_name[0] != '.' && waits_at(at->d_name) == place && strcmp(at->d_name, own) != 0 &&
                !(read_task(at->d_name, "comm", name, sizeof name) && strncmp(name, "nvshare", 7) == 0);
    closedir(threads);
    return found;
}

/* --- the probe --- */

static CUcontext any_context(void)
{
    CUcontext found = NULL;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && found == NULL; gpu++)
        found = nvs_any_context(gpu);
    return found;
}

/* Makes and ends an event until the program runs again.  Locked, the driver lets neither through. */
static void *run_probe(void *nothing)
{
    const CUcontext context = any_context();
    CUevent event;
    atomic_store_explicit(&probe, (int32_t)syscall(SYS_gettid), memory_order_release); /* pairs with a_thread_waits */
    while (context != NULL && atomic_load_explicit(&probing, memory_order_acquire) != 0) { /* pairs with nvs_parking_told */
        if (!nvs_context_enter(context))
            break;
        if (NVS_REAL(cuEventCreate)(&event, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS)
            (void)NVS_REAL(cuEventDestroy_v2)(event);
        CUcontext popped;
        (void)NVS_REAL(cuCtxPopCurrent_v2)(&popped);
        nvs_futex_wait(&probing, 1, nvs_now_ns() + PROBE_NS);
    }
    atomic_store_explicit(&probe, 0, memory_order_release);
    return nothing;
}

/* --- */

static const char *obstacle(void)
{
    if (nvs_capturing())
        return "a stream is being captured";
    if (atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) != 0) /* see its declaration */
        return "it uses memory of other processes (CUDA IPC)";
    if (!threads_are_shown())
        return "the kernel does not show the calls of its threads (/proc/PID/task/TID/syscall)";
    if (any_context() == NULL)
        return "it has no context on a GPU";
    if (atomic_load_explicit(&probe, memory_order_acquire) != 0) /* pairs with its end */
        return "it has just come back";
    return NULL;
}

static void run_again(void)
{
    closed = false;
    nvs_queries_open();
    atomic_store_explicit(&probing, 0, memory_order_release); /* pairs with run_probe */
    nvs_futex_wake(&probing, 1);
}

/* The process may be on other GPUs than before: the driver tells which (contexts/gpu.h).  A coordinator that does not know, as one before it, or a helper
 * that has died, has moved the process, hears it by the next connection. */
static void find_gpus(const nvs_park *message)
{
    bool unknown = false;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_gpu_facts now;
        char *believed = nvs_mail[gpu].facts.uuid;
        if (!nvs_agent_knows(gpu) || nvs_gpu_describe(gpu, &now) != NVS_OK)
            continue;
        const char *told = message->uuid[0] == '\0' ? believed : gpu == message->ordinal ? message->uuid : now.uuid;
        unknown = unknown || strcmp(told, now.uuid) != 0;
        memcpy(believed, now.uuid, sizeof now.uuid);
    }
    if (unknown)
        nvs_link_fail();
}

/* The driver answers each call with an error, as after a sticky one (contexts/context.h). */
static void lose_gpus(void)
{
    nvs_log(NVS_LOG_WARNING, "the driver has failed to take this program off its GPUs or to bring it back: its CUDA calls fail from now on");
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_gate_set_dead(gpu, true);
        if (nvs_agent_knows(gpu))
            nvs_coordinator.memory_changed(gpu);
    }
}

static void close_calls(void)
{
    const char *why = obstacle();
    uint32_t gpu = 0;
    while (gpu < NVS_MAX_GPUS - 1 && !nvs_agent_knows(gpu))
        gpu++;
    if (why == NULL && !nvs_queries_close(gpu, nvs_now_ns() + CLOSING_NS))
        why = "one of its threads waits for its GPU";
    if (why == NULL) {
        atomic_store_explicit(&probing, 1, memory_order_relaxed); /* before the thread is made */
        if (nvs_thread_start(NULL, run_probe, NULL) != 0)
            why = "the host has no memory for a thread";
    }
    if (why == NULL)
        nvs_gpus_remember();
    closed = why == NULL;
    look_at_ns = nvs_now_ns() + LOOK_NS;
    if (why != NULL)
        nvs_queries_open();
    nvs_park_answer answer = {.ready = closed};
    (void)snprintf(answer.reason, sizeof answer.reason, "%s", why != NULL ? why : "");
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    nvs_link_send(frame, nvs_encode_park_answer(&answer, frame, sizeof frame));
}

void nvs_parking_start(void)
{
    closed = false;
    atomic_store_explicit(&probe, 0, memory_order_relaxed); /* of a parent */
    atomic_store_explicit(&probing, 0, memory_order_relaxed);
}

void nvs_parking_told(const nvs_park *message)
{
    if (message->on) {
        if (!closed)
            close_calls();
        return;
    }
    if (message->lost)
        lose_gpus();
    run_again();
    if (!message->lost)
        find_gpus(message);
}

uint64_t nvs_parking_serve(uint64_t now)
{
    if (!closed)
        return UINT64_MAX;
    if (now >= look_at_ns) {
        look_at_ns = now + LOOK_NS;
        const uint32_t gpu = nvs_queries_gpu();
        const nvs_lease *lease = &nvs_agent_gpus[gpu].lease;
        if (!lease->wanted && !nvs_lease_open(lease) && a_thread_waits())
            nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_WANTED});
    }
    return look_at_ns;
}
