/* The application threads' side of the agent: starting it, waiting for it, and its end.  See agent.h.
 *
 * cuInit, or the first thread that needs the coordinator, starts the agent thread.  No thread waits for that: its request is in the mailbox.  If the
 * start fails, all gates open for good and the log says why.
 *
 * Python's signal handlers run while the main thread of a Python program waits for a GPU, as they run in a sleep.
 *
 * CPython's C handler only sets a flag; the handler that the program has set runs when the main thread asks for it, holding
 * the GIL.  docs/decisions/interrupted-waits.md says what happens with an exception that it raises.
 *
 * Invariants: nothing happens without a signal, without CPython, and in other threads.  The waiting thread asks for the
 * GIL only after another thread of ours has got it: a thread that has the GIL and waits for a lock of the waiting one
 * costs the handler, and never the lease.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, gettid, syscall */
#include "coord/agent.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/gpu.h"
#include "coord/mailbox.h"
#include "coord/mover.h"
#include "coord/protocol/link.h"
#include "coord/state.h"
#include "driver/cuda_api.h"
#include "driver/library.h"
#include "gate/gate.h"
#include "inflight/captures.h"
#include "memory/backend.h"
#include "memory/memory.h"
#include "nvshare.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* --- Python's signal handlers --- */

#define PYTHON_LOOK_NS 20000000u
#define HANDOVER_NS 50000000u /* more than PYTHON_LOOK_NS */

typedef struct exception {
    void *type, *value, *trace;
} exception;

/* CPython's functions, found once. */
static struct {
    int (*initialized)(void);
    int (*finalizing)(void); /* may be NULL */
    void *(*own_state)(void);
    void *(*current_state)(void);
    int (*ensure)(void);
    void (*release)(int state);
    int (*check_signals)(void);
    void (*fetch)(void **type, void **value, void **trace);
    void (*restore)(void *type, void *value, void *trace);
    int (*add_pending)(int (*call)(void *argument), void *argument);
    void (*write_unraisable)(void *object);
    bool found;
} python; /* the main thread's; others read what was found before they were made */

enum { IDLE, SEEKING, GOT, TAKING };
NVS_FORK_STATE static _Atomic uint32_t gil; /* futex: whether the GIL can be had */
static uint32_t seeker_gpu;                 /* written before the seeker is made */

static bool look(void *into, const char *name)
{
    void *found = nvs_libc_dlsym() != NULL ? nvs_libc_dlsym()(RTLD_DEFAULT, name) : NULL;
    *(void **)into = found;
    return found != NULL;
}

static bool find_python(void)
{
    if (!python.found)
        python.found = look(&python.initialized, "Py_IsInitialized") && look(&python.own_state, "PyGILState_GetThisThreadState") &&
                       (look(&python.current_state, "PyThreadState_GetUnchecked") || look(&python.current_state, "_PyThreadState_UncheckedGet")) &&
                       look(&python.ensure, "PyGILState_Ensure") &&
                       look(&python.release, "PyGILState_Release") && look(&python.check_signals, "PyErr_CheckSignals") &&
                       look(&python.fetch, "PyErr_Fetch") && look(&python.restore, "PyErr_Restore") &&
                       look(&python.add_pending, "Py_AddPendingCall") && look(&python.write_unraisable, "PyErr_WriteUnraisable") &&
                       (look(&python.finalizing, "Py_IsFinalizing") || look(&python.finalizing, "_Py_IsFinalizing") || true);
    return python.found && python.initialized() && (python.finalizing == NULL || !python.finalizing()) && python.own_state() != NULL;
}

static int raise_it(void *argument)
{
    const exception raised = *(exception *)argument;
    free(argument);
    python.restore(raised.type, raised.value, raised.trace);
    return -1;
}

/* With the GIL.  The caller of the gated call does not expect an exception, so the interpreter raises it later. */
static bool run_handlers(void)
{
    if (python.check_signals() == 0)
        return false;
    exception *raised = malloc(sizeof *raised);
    if (raised != NULL) {
        python.fetch(&raised->type, &raised->value, &raised->trace);
        if (python.add_pending(raise_it, raised) == 0)
            return true;
        python.restore(raised->type, raised->value, raised->trace);
        free(raised);
    }
    python.write_unraisable(NULL);
    return false;
}

/* A thread of ours: waits for the GIL, and gives it to the main thread. */
static void *seek(void *nothing)
{
    const int state = python.ensure();
    atomic_store_explicit(&gil, GOT, memory_order_release); /* pairs with the main thread's exchange */
    nvs_gate_kick(seeker_gpu);
    nvs_futex_wait(&gil, GOT, nvs_now_ns() + HANDOVER_NS);
    uint32_t got = GOT;
    (void)atomic_compare_exchange_strong_explicit(&gil, &got, IDLE, memory_order_relaxed, memory_order_relaxed); /* nobody came */
    python.release(state);
    return nothing;
}

/* In a thread that wakes before the gate of this GPU and has to wait on.  `signalled`: a signal has ended the sleep.
 * `wanted` is the wait's own, false at its begin; while it is true the thread calls again after PYTHON_LOOK_NS.
 * True: a handler has raised an exception, which Python raises as soon as the call has returned. */
static bool python_handlers(uint32_t gpu, bool signalled, bool *wanted)
{
    if ((!signalled && !*wanted) || syscall(SYS_gettid) != getpid() || !find_python())
        return false;
    *wanted = false;
    if (python.current_state() == python.own_state())
        return run_handlers(); /* it has waited with the GIL */
    uint32_t seen = GOT;
    if (atomic_compare_exchange_strong_explicit(&gil, &seen, TAKING, memory_order_acquire, memory_order_relaxed)) { /* pairs with seek */
        nvs_futex_wake(&gil, 1);
        const int state = python.ensure();
        atomic_store_explicit(&gil, IDLE, memory_order_relaxed); /* a handler may wait for a GPU too */
        const bool raised = run_handlers();
        python.release(state);
        return raised;
    }
    *wanted = true;
    if (seen == IDLE) {
        seeker_gpu = gpu;
        atomic_store_explicit(&gil, SEEKING, memory_order_relaxed); /* before the thread is made */
        if (nvs_thread_start(NULL, seek, NULL) != 0)
            atomic_store_explicit(&gil, IDLE, memory_order_relaxed);
    }
    return false;
}

/* --- the agent --- */

#define GOODBYE_NS 50000000u

/* Without an agent nothing is shared: all gates open for good. */
static void fail(const char *what, int error)
{
    nvs_log(NVS_LOG_ERROR, "%s: %s; not sharing", what, strerror(error));
    nvs_agent_close_eventfd();
    atomic_store_explicit(&nvs_agent_phase, NVS_AGENT_FAILED, memory_order_release); /* pairs with the acquire in start */
    atomic_store_explicit(&nvs_agent_departed, 1, memory_order_release); /* as in depart() */
    nvs_futex_wake(&nvs_agent_departed, INT32_MAX);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_gate_open(gpu, false);
        atomic_store_explicit(&nvs_mail[gpu].settled, 1, memory_order_release);
        nvs_futex_wake(&nvs_mail[gpu].settled, INT32_MAX);
    }
}

static bool one_thread(void)
{
    struct stat tasks; /* as the kernel has it on both architectures; stat() is too new (base/glibc_floor.h) */
    return syscall(SYS_newfstatat, AT_FDCWD, "/proc/self/task", &tasks, 0) == 0 && tasks.st_nlink == 3; /* "." and ".." are links too */
}

static void *begin(void *nothing)
{
    if (nvs_agent_eventfd(true) < 0) {
        fail("cannot make an eventfd", errno);
        return NULL;
    }
    (void)atomic_exchange_explicit(&nvs_agent_phase, NVS_AGENT_RUNNING, memory_order_acq_rel); /* pairs with nvs_agent_poke */
    return nvs_agent_main(nothing);
}

static bool start(void)
{
    uint32_t none = NVS_AGENT_NONE;
    /* acquire: pairs with the releases above */
    uint32_t seen = atomic_load_explicit(&nvs_agent_phase, memory_order_acquire);
    if (NVS_LIKELY(seen == NVS_AGENT_RUNNING || seen == NVS_AGENT_STARTING))
        return true;
    if (seen == NVS_AGENT_FAILED || !nvs_config.enabled)
        return false;
    nvs_fork_prepare();
    nvs_reals_resolve();
    if (!atomic_compare_exchange_strong_explicit(&nvs_agent_phase, &none, NVS_AGENT_STARTING, memory_order_acquire,
                                                 memory_order_acquire))
        return none != NVS_AGENT_FAILED;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        (void)pthread_mutex_init(&nvs_mail[gpu].reserve.asking, NULL);
        (void)pthread_mutex_init(&nvs_mail[gpu].pins.asking, NULL);
    }
    const int cancel = nvs_cancel_defer(); /* other threads wait for the end of the start */
    if (one_thread())
        (void)nvs_agent_eventfd(true); /* see there */
    int failed = nvs_thread_start(NULL, begin, NULL);
    nvs_cancel_allow(cancel);
    if (failed != 0)
        fail("cannot make a thread", failed);
    return failed == 0;
}

/* Asks the driver for the GPU's identity, once, on an application's thread. */
static bool describe(uint32_t gpu)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    uint32_t seen = atomic_load_explicit(&mail->facts_state, memory_order_acquire); /* pairs with the release below */
    while (seen != NVS_FACTS_KNOWN) {
        if (seen == NVS_FACTS_FAILED)
            return false;
        if (seen == NVS_FACTS_ASKING) {
            nvs_futex_wait(&mail->facts_state, NVS_FACTS_ASKING, UINT64_MAX);
            seen = atomic_load_explicit(&mail->facts_state, memory_order_acquire);
            continue;
        }
        if (!atomic_compare_exchange_strong_explicit(&mail->facts_state, &seen, NVS_FACTS_ASKING, memory_order_acquire,
                                                     memory_order_acquire))
            continue;
        nvs_memory_choose_mode(); /* if the driver began without our cuInit */
        nvs_status status = nvs_gpu_describe(gpu, &mail->facts);
        seen = status == NVS_OK ? NVS_FACTS_KNOWN : NVS_FACTS_FAILED;
        if (seen == NVS_FACTS_FAILED) {
            nvs_log(status == NVS_UNAVAILABLE ? NVS_LOG_INFO : NVS_LOG_WARNING, "GPU %u has no UUID that the driver tells; it is not shared", gpu);
            nvs_gate_open(gpu, false);
            atomic_store_explicit(&mail->settled, 1, memory_order_release);
        }
        atomic_store_explicit(&mail->facts_state, seen, memory_order_release); /* pairs with the acquires above */
        nvs_futex_wake(&mail->facts_state, INT32_MAX);
        nvs_agent_poke();
    }
    return true;
}

/* Ends the wait of this thread without a lease, if its call can fail. */
static bool stop(void)
{
    if (nvs_self == NULL || nvs_self->stop != NVS_STOP_ALLOWED)
        return false;
    nvs_self->stop = NVS_STOPPED;
    return true;
}

void nvs_agent_wait_for_lease(uint32_t gpu)
{
    int saved = errno;
    bool stopped = false;
    const bool started = start(); /* first: it registers the fork handlers */
    bool first = nvs_gate_wait_begin(gpu); /* before the agent learns of the GPU, so that AttachGpu requests the lease */
    if (started && describe(gpu)) {
        if (first)
            nvs_agent_poke();
        bool handlers = false;
        while (errno = 0, !nvs_gate_wait(gpu, handlers ? nvs_now_ns() + PYTHON_LOOK_NS : UINT64_MAX)) {
            if (python_handlers(gpu, errno == EINTR, &handlers) && stop()) {
                stopped = true;
                break;
            }
            if (nvs_self != NULL && nvs_self->stop == NVS_STOP_AT_EXIT &&
                atomic_load_explicit(&nvs_agent_departing, memory_order_acquire) != 0) { /* pairs with at_exit */
                nvs_self->stop = NVS_STOPPED;
                break;
            }
            if (nvs_gate_wait_begin(gpu)) /* again, if a signal handler waited meanwhile and ended the count */
                nvs_agent_poke();
        }
    }
    nvs_gate_wait_end(gpu);
    if (stopped) {
        atomic_store_explicit(&nvs_mail[gpu].stopped, 1, memory_order_relaxed); /* the poke publishes it */
        nvs_agent_poke();
    }
    errno = saved;
}

/* The end of the process, before the driver's own handler: the leases go back, and the agent makes no more calls. */
static void at_exit(void)
{
    int saved = errno;
    const uint32_t seen = atomic_load_explicit(&nvs_agent_phase, memory_order_acquire); /* a fork's child may have no agent */
    nvs_log_ending();
    nvs_gate_awaited(nvs_query_enter()); /* a parked process comes back first: the driver's own end needs the card */
    if (seen == NVS_AGENT_RUNNING || seen == NVS_AGENT_STARTING) {
        uint64_t until = nvs_now_ns() + GOODBYE_NS;
        atomic_store_explicit(&nvs_agent_departing, 1, memory_order_release); /* pairs with the acquire of the agent */
        nvs_agent_poke();
        while (atomic_load_explicit(&nvs_agent_departed, memory_order_acquire) == 0 && nvs_now_ns() < until)
            nvs_futex_wait(&nvs_agent_departed, 0, until);
        for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
            nvs_gate_kick(gpu); /* for host functions */
    }
    errno = saved;
}

/* After the driver's own handler: each call says CUDA_ERROR_DEINITIALIZED and needs no lease. */
static void after_driver(void)
{
    int saved = errno;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_gate_set_dead(gpu, true);
    errno = saved;
}

/* exit() runs the handlers backwards, and the driver registers its own in cuInit.  A fork's child inherits them. */
static void register_once(atomic_flag *done, void (*handler)(void))
{
    if (!atomic_flag_test_and_set_explicit(done, memory_order_relaxed)) /* publishes nothing */
        (void)atexit(handler);
}

void nvs_agent_driver_begun(bool ready)
{
    static atomic_flag registered = ATOMIC_FLAG_INIT;
    int saved = errno;
    nvs_memory_choose_mode();
    if (ready)
        register_once(&registered, at_exit);
    if (nvs_config.memory_late)
        nvs_agent_poke();
    errno = saved;
}

void nvs_agent_begin(void)
{
    static atomic_flag registered = ATOMIC_FLAG_INIT;
    int saved = errno;
    register_once(&registered, after_driver);
    const char *visible = getenv("CUDA_VISIBLE_DEVICES");
    if (visible == NULL || (visible[0] != 0 && visible[0] != '-')) /* else the driver finds no GPU */
        (void)start();
    errno = saved;
}

void nvs_agent_expect(uint32_t gpu)
{
    int saved = errno;
    if (atomic_load_explicit(&nvs_mail[gpu].settled, memory_order_relaxed) == 0 && start() && describe(gpu)) /* a hint */
        nvs_agent_poke();
    errno = saved;
}

void nvs_agent_attach(uint32_t gpu)
{
    nvs_mailbox *mail = &nvs_mail[gpu];
    if (NVS_LIKELY(atomic_load_explicit(&mail->settled, memory_order_acquire) != 0)) /* pairs with the agent's release */
        return;
    int saved = errno;
    if (nvs_config.enabled && start() && describe(gpu) &&
        atomic_load_explicit(&mail->waited, memory_order_relaxed) == 0) {
        uint64_t until = nvs_now_ns() + NVS_FIRST_ANSWER_NS;
        nvs_agent_poke();
        while (atomic_load_explicit(&mail->settled, memory_order_acquire) == 0 && nvs_now_ns() < until &&
               !atomic_load_explicit(&nvs_agent_departing, memory_order_relaxed))
            nvs_futex_wait(&mail->settled, 0, until);
        atomic_store_explicit(&mail->waited, 1, memory_order_relaxed); /* later calls do not wait again */
    }
    errno = saved;
}

static nvs_status ask(uint32_t gpu, nvs_question *of, uint64_t total_bytes, uint64_t lacking_bytes)
{
    int saved = errno;
    nvs_status status = NVS_UNAVAILABLE;
    nvs_agent_attach(gpu);
    if (atomic_load_explicit(&nvs_agent_phase, memory_order_acquire) == NVS_AGENT_RUNNING && /* the mutexes were made before */
        atomic_load_explicit(&nvs_mail[gpu].facts_state, memory_order_acquire) == NVS_FACTS_KNOWN) /* else the agent cannot ask about it */
        status = nvs_question_ask(of, total_bytes, lacking_bytes);
    errno = saved;
    return status;
}

nvs_status nvs_agent_reserve(uint32_t gpu, uint64_t total_bytes, uint64_t lacking_bytes)
{
    return ask(gpu, &nvs_mail[gpu].reserve, total_bytes, lacking_bytes);
}

nvs_status nvs_agent_reserve_pins(uint32_t gpu, uint64_t total_bytes)
{
    if (atomic_load_explicit(&nvs_mail[gpu].ask_pins, memory_order_relaxed) == 0)
        return NVS_UNAVAILABLE;
    return ask(gpu, &nvs_mail[gpu].pins, total_bytes, 0);
}

void nvs_agent_link(uint32_t gpus)
{
    enum { LOOK_NS = 100000000 }; /* for the end of the process */
    uint32_t links = atomic_load_explicit(&nvs_gate_links, memory_order_acquire); /* pairs with link_gpus, as below */
    if (NVS_LIKELY((gpus & ~links) == 0) || (gpus & (gpus - 1)) == 0 || !nvs_config.enabled)
        return;
    int saved = errno;
    bool known = start();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && known; gpu++)
        known = (gpus >> gpu & 1) == 0 || describe(gpu);
    if (known && atomic_load_explicit(&nvs_agent_phase, memory_order_acquire) != NVS_AGENT_FAILED) { /* else all gates are open */
        atomic_fetch_or_explicit(&nvs_links_wanted, gpus, memory_order_release);
        nvs_agent_poke();
        while ((gpus & ~links) != 0 && atomic_load_explicit(&nvs_agent_departing, memory_order_relaxed) == 0 && /* a hint, as the next */
               atomic_load_explicit(&nvs_agent_phase, memory_order_relaxed) != NVS_AGENT_FAILED) {
            nvs_futex_wait(&nvs_gate_links, links, nvs_now_ns() + LOOK_NS);
            links = atomic_load_explicit(&nvs_gate_links, memory_order_acquire);
        }
    }
    errno = saved;
}

nvs_status nvs_agent_reopen(uint32_t gpu)
{
    if (atomic_load_explicit(&nvs_agent_phase, memory_order_relaxed) != NVS_AGENT_RUNNING || /* nothing is read that it publishes */
        atomic_load_explicit(&nvs_agent_departing, memory_order_relaxed) != 0)
        return NVS_UNAVAILABLE;
    int saved = errno;
    if (atomic_exchange_explicit(&nvs_mail[gpu].reopen, 1, memory_order_seq_cst) == 0)
        nvs_agent_poke();
    errno = saved;
    return NVS_OK;
}

void nvs_agent_memory_changed(uint32_t gpu)
{
    /* seq_cst: the agent clears the flag before it reads the figures, so a later change pokes again. */
    if (atomic_exchange_explicit(&nvs_ledgers[gpu].to_report, 1, memory_order_seq_cst) == 0) {
        int saved = errno;
        nvs_agent_poke();
        errno = saved;
    }
}

NVS_FORK_CODE void nvs_agent_after_fork(void)
{
    /* One thread: nothing here may take a lock, which another thread of the parent may hold. */
    nvs_mailbox_after_fork();
    nvs_transport_abandon();
    nvs_movers_after_fork();
    nvs_state_after_fork();
    atomic_store_explicit(&gil, IDLE, memory_order_relaxed); /* one thread */
}

/* --- the functions of nvshare.h, for programs that know of the hook --- */

NVS_EXPORT const char *nvshare_version(void)
{
    return NVS_VERSION;
}

NVS_EXPORT int nvshare_active(void)
{
    uint32_t seen = atomic_load_explicit(&nvs_agent_phase, memory_order_relaxed);
    return seen == NVS_AGENT_FAILED ? -1 : seen == NVS_AGENT_RUNNING;
}

NVS_EXPORT int nvshare_gpu_state(uint32_t gpu, struct nvshare_gpu *out)
{
    if (gpu >= NVS_MAX_GPUS || out == NULL || out->size < sizeof *out)
        return -1;
    nvs_usage usage;
    nvs_memory_usage(gpu, &usage);
    /* Not usage.allocated_bytes: memory that the program has freed counts there until a mover that is at work on it is done. */
    const uint64_t allocated = atomic_load_explicit(&nvs_ledgers[gpu].charged, memory_order_relaxed); /* a figure */
    *out = (struct nvshare_gpu){
        .size = sizeof *out,
        .lease = atomic_load_explicit(&nvs_mail[gpu].shown_state, memory_order_relaxed),
        .lease_id = atomic_load_explicit(&nvs_mail[gpu].shown_lease, memory_order_relaxed),
        .waiters = atomic_load_explicit(&nvs_mail[gpu].shown_waiters, memory_order_relaxed),
        .waiting_threads = nvs_gate_waiting(gpu),
        .calls = nvs_gate_calls(gpu),
        .allocated_bytes = allocated,
        .resident_bytes = usage.resident_bytes < allocated ? usage.resident_bytes : allocated,
    };
    return 0;
}

NVS_EXPORT int nvshare_yield(uint32_t gpu)
{
    if (gpu >= NVS_MAX_GPUS)
        return -1;
    int saved = errno;
    if (atomic_exchange_explicit(&nvs_mail[gpu].yield, 1, memory_order_seq_cst) == 0)
        nvs_agent_poke();
    errno = saved;
    return 0;
}

NVS_EXPORT void nvshare_step(void)
{
    (void)atomic_fetch_add_explicit(&nvs_steps, 1, memory_order_relaxed); /* a count, orders nothing */
}

NVS_EXPORT int nvshare_pressure(uint64_t *times)
{
    if (times != NULL)
        *times = atomic_load_explicit(&nvs_pressure_times, memory_order_relaxed); /* a count */
    if (nvs_capturing())
        return -1;
    return atomic_load_explicit(&nvs_pressure_gpus, memory_order_relaxed) != 0; /* a hint */
}

NVS_EXPORT int nvshare_released(uint32_t gpu, uint64_t bytes)
{
    if (gpu >= NVS_MAX_GPUS)
        return -1;
    (void)atomic_fetch_add_explicit(&nvs_mail[gpu].released_bytes, bytes, memory_order_relaxed); /* a sum */
    nvs_agent_memory_changed(gpu);
    return 0;
}

/* The hook's own threads move memory while the gate is closed: this is neither a bypass nor work of the application. */
NVS_EXPORT uint32_t nvshare_gate_depth(void)
{
    const nvs_slot *slot = nvs_self;
    if (slot != NULL && atomic_load_explicit(&slot->active, memory_order_relaxed) != 0) /* written by this thread only */
        return 1;
    return nvs_thread_is_own() ? UINT32_MAX : 0;
}
