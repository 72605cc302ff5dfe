/* The slow side of the gate: slots, closing, waiting, and the start in a process.  The fast path is in gate.h.
 *
 * Why no call can slip past a closed gate.  A caller does
 *     E1: active = gpu + 1 (plain store)     E2: read state
 * and the closer does
 *     C1: state = CLOSED     C2: membarrier     C3: read active of every slot.
 * membarrier(PRIVATE_EXPEDITED) makes every running thread of the process execute a full memory barrier at some point of
 * its program between C1 and C3 (a thread that does not run had one when it was scheduled out).  If that point lies after
 * E1, then E1 is visible to C3: the closer sees the slot and waits.  If it lies before E1, then E2 comes after it too and
 * reads what C1 wrote: the caller sees CLOSED and takes the slow path.  The compiler keeps E1 before E2 because of the
 * signal fence.  A slot that is registered during C3 is new to the list; its push is a seq_cst exchange after which the
 * thread still has to do E1 and E2, and the closer reads the list's head after C2, so either it finds the slot or the
 * thread's E2 comes after C1.
 *
 * Leaving is the mirror image: L1: active = 0, L2: read state.  Either C3 sees L1, or L2 sees CLOSED and the caller wakes
 * the closer, which sleeps on `left` and had read its value before C3.  No wake-up is lost.
 *
 * Without membarrier (old kernels, some sandboxes) each gate's word has the flag NVS_GATE_FENCED.  A caller that reads the flag at
 * E2 or L2 takes the slow path, which has a full fence and reads the word again after it; the second value counts.  The closer has a
 * fence too, so the usual store-buffer argument holds.  If membarrier fails later, see barrier_everywhere.
 *
 * Linked GPUs: C1 writes the words of all their gates before C2, and C3 looks for calls of all of them.
 *
 * nvs_gate_enter_nowait has no E2; inflight/drain.c says why that is enough.
 *
 * A thread that is cancelled inside a call frees its slot in the destructor of its key.  A longjmp out of a gated driver call
 * leaves the slot active: that thread never waits at a gate again.  A handler may jump out of the wait for a lease: a waiting
 * thread is inside no gate.
 *
 * Non-goals: leases, CUDA, messages.
 */
#include "gate/gate.h"

#include "base/base.h"
#include "base/config.h"
#include "base/hot.h"
#include "base/process.h"
#include "base/system.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_membarrier
#if defined(__x86_64__)
#define SYS_membarrier 324
#elif defined(__aarch64__)
#define SYS_membarrier 283
#endif
#endif
enum { MEMBARRIER_EXPEDITED = 1 << 3, MEMBARRIER_REGISTER = 1 << 4 }; /* PRIVATE_EXPEDITED and its registration */

enum { SPINS = 200, SETTLE_NS = 1000000 };

NVS_FORK_STATE static _Atomic uint32_t fenced; /* NVS_GATE_FENCED once it is needed, before that 0.  Relaxed: each gate's word has its own flag */

static _Atomic(nvs_slot *) slots;         /* head of the list of all slots; only grows */
static _Atomic uint32_t first_slots_used;
static pthread_key_t slot_key;
static bool slot_key_made = false;
NVS_FORK_STATE static bool armed = false; /* written before any other thread exists, or by tests */

static uint32_t need_fences(void)
{
    return atomic_load_explicit(&fenced, memory_order_relaxed); /* see its declaration */
}

/* A thread has left while another closes the gate. */
static void wake_closer(nvs_gate *gate)
{
    int saved = errno;
    atomic_fetch_add_explicit(&gate->left, 1, memory_order_release); /* pairs with the acquire load in close */
    nvs_futex_wake(&gate->left, 1);
    errno = saved;
}

/* Destructor: the thread ends, perhaps inside a call. */
static void slot_abandon(void *argument)
{
    nvs_slot *slot = argument;
    int saved = errno;
    nvs_gate_wait_end(0); /* the slot names the gate */
    nvs_self = NULL;
    atomic_store_explicit(&slot->awaiting, 0, memory_order_relaxed);
    nvs_gate_leave_nowait(slot);
    /* Pairs with the acquire in slot_reuse: the next owner finds the slot clean. */
    atomic_store_explicit(&slot->owned, 0, memory_order_release);
    errno = saved;
}

static nvs_slot *slot_reuse(void)
{
    /* acquire: pairs with the push in slot_make; the slot's fields are set */
    for (nvs_slot *slot = atomic_load_explicit(&slots, memory_order_acquire); slot != NULL; slot = slot->next) {
        uint32_t nobody = 0;
        if (atomic_load_explicit(&slot->owned, memory_order_relaxed) == 0 &&
            atomic_compare_exchange_strong_explicit(&slot->owned, &nobody, 1, memory_order_acquire,
                                                    memory_order_relaxed)) /* pairs with slot_abandon */
            return slot;
    }
    return NULL;
}

static nvs_slot *slot_make(void)
{
    nvs_slot *slot = NULL;
    if (atomic_load_explicit(&first_slots_used, memory_order_relaxed) < NVS_FIRST_SLOTS) {
        uint32_t index = atomic_fetch_add_explicit(&first_slots_used, 1, memory_order_relaxed); /* a counter only */
        if (index < NVS_FIRST_SLOTS)
            slot = &nvs_hot.first_slots[index];
    }
    if (slot == NULL) {
        void *memory = NULL;
        if (posix_memalign(&memory, 64, sizeof(nvs_slot)) != 0)
            return NULL;
        memset(memory, 0, sizeof(nvs_slot));
        slot = memory;
    }
    atomic_store_explicit(&slot->owned, 1, memory_order_relaxed); /* published by the push */
    nvs_slot *head = atomic_load_explicit(&slots, memory_order_relaxed);
    do
        slot->next = head;
    while (!atomic_compare_exchange_weak_explicit(&slots, &head, slot, memory_order_seq_cst, memory_order_relaxed));
    return slot;
}

nvs_slot *nvs_slot_register(void)
{
    int saved = errno;
    nvs_slot *slot = slot_reuse();
    if (slot == NULL)
        slot = slot_make();
    if (slot != NULL) {
        slot->pace.stride = slot->pace.countdown = NVS_FIRST_STRIDE;
        slot->pace.unseen = slot->owner_uses = 0;
        nvs_self = slot;
        if (slot_key_made)
            (void)pthread_setspecific(slot_key, slot); /* if this fails, the slot is never reused */
    }
    errno = saved;
    return slot;
}

/* The gate's word; without membarrier, read after a full fence.  With membarrier there is no fence: a fence after a launch waits for the
 * driver's writes to the device. */
static uint32_t after_fence(uint32_t gpu)
{
    const uint32_t word = atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_acquire); /* pairs with nvs_gate_open, as below */
    if ((word & NVS_GATE_FENCED) == 0)
        return word;
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the closer's */
    return atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_acquire);
}

/* False: the wait was stopped, and the slot is not announced. */
static bool enter_slow(nvs_slot *slot, uint32_t gpu, uint32_t stop)
{
    int saved = errno;
    bool stopped = false;
    const uint32_t outer = slot->stop; /* of a wait that a signal handler has interrupted */
    nvs_gate *gate = &nvs_gates[gpu];
    if (!(after_fence(gpu) & NVS_GATE_CLOSED) || nvs_gate_dead(gpu))
        return true;
    for (;;) { /* a waiting thread is inside no gate: a handler may interrupt the wait, and jump out of it */
        atomic_store_explicit(&slot->active, 0, memory_order_seq_cst); /* as in nvs_gate_leave */
        if (atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_relaxed) & NVS_GATE_CLOSED)
            wake_closer(gate);
        slot->stop = stop;
        nvs_coordinator.wait_for_lease(gpu);
        stopped = slot->stop == NVS_STOPPED;
        if (stopped)
            break;
        atomic_store_explicit(&slot->active, gpu + 1, memory_order_seq_cst);
        /* Pairs with the closer's store and membarrier, as in nvs_gate_enter. */
        if (nvs_gate_passes(gpu))
            break;
    }
    slot->stop = outer;
    errno = saved;
    return !stopped;
}

void nvs_gate_enter_slow(nvs_slot *slot, uint32_t gpu)
{
    (void)enter_slow(slot, gpu, NVS_STOP_NEVER);
}

bool nvs_gate_enter_stoppable_slow(nvs_slot *slot, uint32_t gpu)
{
    return enter_slow(slot, gpu, NVS_STOP_ALLOWED);
}

bool nvs_gate_leave_slow(nvs_slot *slot, uint32_t gpu)
{
    nvs_gate *gate = &nvs_gates[gpu];
    const uint32_t state = after_fence(gpu);
    bool look = slot->pace.countdown == 0;
    if (look) { /* unless the caller paces this submission, pacing looks at the next one */
        slot->pace.unseen += slot->pace.stride;
        slot->pace.stride = slot->pace.countdown = 1;
    }
    if (state & NVS_GATE_CLOSED) {
        wake_closer(gate);
        return false;
    }
    return look || (state & NVS_GATE_PACED) != 0;
}

static nvs_slot *enter_as(uint32_t active)
{
    nvs_slot *slot = nvs_self;
    if ((slot == NULL && (slot = nvs_slot_register()) == NULL) ||
        atomic_load_explicit(&slot->active, memory_order_relaxed) != 0) /* written by this thread only */
        return NULL;
    atomic_store_explicit(&slot->active, active, memory_order_seq_cst); /* pairs with nvs_gate_inside */
    return slot;
}

nvs_slot *nvs_gate_enter_nowait(uint32_t gpu)
{
    return gpu < NVS_MAX_GPUS ? enter_as(NVS_ACTIVE_NOWAIT | (gpu + 1)) : NULL;
}

nvs_slot *nvs_gate_enter_host(void)
{
    return enter_as(NVS_ACTIVE_HOST);
}

void nvs_gate_leave_nowait(nvs_slot *slot)
{
    if (slot == NULL)
        return;
    const uint32_t active = atomic_exchange_explicit(&slot->active, 0, memory_order_seq_cst) & NVS_ACTIVE_GPU; /* as above; 0: a fork meanwhile */
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the closer's: it sees 0, or this thread sees CLOSED */
    if (active != 0 && (atomic_load_explicit(&nvs_hot.gates[active - 1], memory_order_seq_cst) & NVS_GATE_CLOSED) != 0)
        wake_closer(&nvs_gates[active - 1]);
}

bool nvs_gate_lets_on(uint32_t gpu)
{
    bool passes = nvs_gate_passes(gpu);
    for (nvs_slot *at = atomic_load_explicit(&slots, memory_order_acquire); !passes && at != NULL; at = at->next)
        passes = atomic_load_explicit(&at->active, memory_order_seq_cst) == gpu + 1; /* pairs with nvs_gate_leave; without NVS_ACTIVE_NOWAIT */
    return passes;
}

void nvs_gate_init(void)
{
    if (!slot_key_made)
        slot_key_made = pthread_key_create(&slot_key, slot_abandon) == 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        atomic_store_explicit(&nvs_hot.gates[gpu], need_fences() | NVS_GATE_OPEN, memory_order_relaxed); /* no other thread runs yet */
    armed = false;
}

static bool membarrier(int command)
{
#ifdef SYS_membarrier
    return syscall(SYS_membarrier, command, 0, 0) == 0;
#else
    (void)command;
    return false;
#endif
}

void nvs_gate_arm(void)
{
    atomic_store_explicit(&fenced, membarrier(MEMBARRIER_REGISTER) ? 0 : NVS_GATE_FENCED, memory_order_relaxed); /* see its declaration */
    armed = true;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        atomic_store_explicit(&nvs_hot.gates[gpu], need_fences() | NVS_GATE_CLOSED, memory_order_relaxed); /* no other thread runs yet */
}

/* A barrier in every thread, for a gate that was open without fences and has just closed.  In a sandbox that the process entered after its start,
 * membarrier may fail.  A nap replaces it, since stores reach memory within microseconds, and gates that open later have fences. */
static void barrier_everywhere(void)
{
    if (membarrier(MEMBARRIER_EXPEDITED) || (membarrier(MEMBARRIER_REGISTER) && membarrier(MEMBARRIER_EXPEDITED)))
        return;
    nvs_nap(SETTLE_NS);
    atomic_store_explicit(&fenced, NVS_GATE_FENCED, memory_order_relaxed); /* see its declaration */
}

void nvs_gate_open(uint32_t gpu, bool paced)
{
    nvs_gate *gate = &nvs_gates[gpu];
    /* release: the opener's work (restored memory) happens before the calls that enter with an acquire load */
    uint32_t before =
        atomic_exchange_explicit(&nvs_hot.gates[gpu], need_fences() | (paced ? NVS_GATE_PACED : NVS_GATE_OPEN), memory_order_acq_rel);
    if (before & NVS_GATE_CLOSED) {
        atomic_fetch_add_explicit(&gate->turn, 1, memory_order_seq_cst); /* pairs with the load in nvs_gate_wait */
        if (atomic_load_explicit(&gate->waiting, memory_order_seq_cst) != 0)
            nvs_futex_wake(&gate->turn, INT32_MAX);
    }
}

nvs_status nvs_gate_close(uint32_t gpu, uint64_t deadline_ns)
{
    int saved = errno;
    nvs_status status = NVS_OK;
    const uint32_t gpus = nvs_gate_linked_with(gpu);
    bool unfenced = false;
    for (uint32_t each = 0; each < NVS_MAX_GPUS; each++)
        if ((gpus >> each & 1) != 0)
            unfenced |= (atomic_exchange_explicit(&nvs_hot.gates[each], need_fences() | NVS_GATE_CLOSED, memory_order_seq_cst) & NVS_GATE_FENCED) == 0;
    if (unfenced)
        barrier_everywhere();
    atomic_thread_fence(memory_order_seq_cst); /* pairs with the fences of the slow paths, for NVS_GATE_FENCED */
    for (unsigned spins = 0;; spins++) {
        uint32_t left = 0, each = 0;
        for (; each < NVS_MAX_GPUS; each++) {
            left = atomic_load_explicit(&nvs_gates[each].left, memory_order_acquire); /* before the slots are read */
            if ((gpus >> each & 1) != 0 && nvs_gate_inside(each))
                break;
        }
        if (each == NVS_MAX_GPUS)
            break;
        if (spins < SPINS) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#endif
            continue;
        }
        uint64_t now = nvs_now_ns();
        if (now >= deadline_ns) {
            status = NVS_TIMED_OUT;
            break;
        }
        /* A leaving thread wakes this one; the bound is for a thread that ended without a wake-up. */
        uint64_t look = now + 10000000u;
        nvs_futex_wait(&nvs_gates[each].left, left, look < deadline_ns ? look : deadline_ns);
    }
    errno = saved;
    return status;
}

void nvs_query_enter_slow(nvs_slot *slot, uint32_t awaiting)
{
    const int saved = errno;
    uint32_t parked;
    while ((parked = atomic_load_explicit(&nvs_hot.parked, memory_order_seq_cst)) != 0) {
        atomic_store_explicit(&slot->awaiting, 0, memory_order_seq_cst); /* pairs with nvs_queries_close, as does the next */
        nvs_coordinator.wait_for_lease(parked - 1);
        atomic_store_explicit(&slot->awaiting, awaiting, memory_order_seq_cst);
    }
    errno = saved;
}

static bool any_query(void)
{
    for (nvs_slot *slot = atomic_load_explicit(&slots, memory_order_acquire); slot != NULL; slot = slot->next)
        if (atomic_load_explicit(&slot->awaiting, memory_order_acquire) != 0) /* pairs with nvs_gate_awaited */
            return true;
    return false;
}

/* The proof is that of nvs_gate_close, with `awaiting` for `active` and `parked` for the gate's word. */
bool nvs_queries_close(uint32_t gpu, uint64_t deadline_ns)
{
    if (need_fences() != 0)
        return false;
    atomic_store_explicit(&nvs_hot.parked, gpu + 1, memory_order_seq_cst);
    if (!membarrier(MEMBARRIER_EXPEDITED))
        return false;
    while (any_query()) {
        if (nvs_now_ns() >= deadline_ns)
            return false;
        nvs_nap(SETTLE_NS);
    }
    return true;
}

void nvs_queries_open(void)
{
    atomic_store_explicit(&nvs_hot.parked, 0, memory_order_release); /* the threads that wait have asked for a lease, which opens their gate */
}

uint32_t nvs_queries_gpu(void)
{
    const uint32_t parked = atomic_load_explicit(&nvs_hot.parked, memory_order_relaxed); /* written by the caller's thread, the agent */
    return parked != 0 ? parked - 1 : 0;
}

bool nvs_gate_inside(uint32_t gpu)
{
    for (nvs_slot *slot = atomic_load_explicit(&slots, memory_order_acquire); slot != NULL; slot = slot->next)
        if ((atomic_load_explicit(&slot->active, memory_order_acquire) & NVS_ACTIVE_GPU) == gpu + 1) /* pairs with nvs_gate_leave */
            return true;
    return false;
}

bool nvs_gate_in_use(uint32_t gpu)
{
    if (nvs_gate_waiting(gpu) > 0)
        return true; /* the gate may be open, and they are waking up */
    for (nvs_slot *slot = atomic_load_explicit(&slots, memory_order_acquire); slot != NULL; slot = slot->next)
        if ((atomic_load_explicit(&slot->active, memory_order_relaxed) & NVS_ACTIVE_GPU) == gpu + 1 ||
            atomic_load_explicit(&slot->awaiting, memory_order_relaxed) == gpu + 1) /* a sample, orders nothing */
            return true;
    return false;
}

uint64_t nvs_gate_calls(uint32_t gpu)
{
    uint64_t sum = 0;
    for (nvs_slot *slot = atomic_load_explicit(&slots, memory_order_acquire); slot != NULL; slot = slot->next)
        sum += atomic_load_explicit(&slot->calls[gpu], memory_order_relaxed); /* a count, orders nothing */
    return sum;
}

NVS_FORK_CODE void nvs_gate_after_fork(void)
{
    /* The child has only this thread.  It keeps its slot; all other slots are free. */
    for (nvs_slot *slot = atomic_load_explicit(&slots, memory_order_relaxed); slot != NULL; slot = slot->next) {
        slot->waits = 0;
        atomic_store_explicit(&slot->awaiting, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->active, 0, memory_order_relaxed);
        atomic_store_explicit(&slot->owned, slot == nvs_self ? 1 : 0, memory_order_relaxed);
    }
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        atomic_store_explicit(&nvs_gates[gpu].waiting, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_gates[gpu].watcher, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_gates[gpu].alert_until_ns, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_gates[gpu].dead, false, memory_order_relaxed);
        atomic_store_explicit(&nvs_hot.gates[gpu], need_fences() | (armed ? NVS_GATE_CLOSED : NVS_GATE_OPEN), memory_order_relaxed);
    }
    atomic_store_explicit(&nvs_hot.parked, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_gate_links, 0, memory_order_relaxed);
    if (armed)
        nvs_gate_arm(); /* the registration for membarrier belongs to the parent's address space */
}

enum { NAP_NS = 25000 };

NVS_FORK_STATE nvs_gate nvs_gates[NVS_MAX_GPUS];
NVS_FORK_STATE _Atomic uint32_t nvs_gate_links;
_Thread_local nvs_slot *nvs_self __attribute__((tls_model("initial-exec")));

bool nvs_gate_passes(uint32_t gpu)
{
    return !(atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_seq_cst) & NVS_GATE_CLOSED) || nvs_gate_dead(gpu);
}

uint32_t nvs_gate_waiting(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_gates[gpu].waiting, memory_order_seq_cst);
}

static void stop_waiting(uint32_t gpu)
{
    atomic_fetch_sub_explicit(&nvs_gates[gpu].waiting, 1, memory_order_seq_cst);
}

bool nvs_gate_wait_begin(uint32_t gpu)
{
    nvs_slot *slot = nvs_self;
    if (slot != NULL && slot->waits == gpu + 1)
        return false;
    if (slot != NULL && slot->waits != 0)
        stop_waiting(slot->waits - 1); /* at another gate: a handler has interrupted that wait, or jumped out of it */
    if (slot != NULL)
        slot->waits = gpu + 1;
    /* seq_cst: pairs with the load in nvs_gate_open; one of the two sees the other */
    return atomic_fetch_add_explicit(&nvs_gates[gpu].waiting, 1, memory_order_seq_cst) == 0;
}

bool nvs_gate_wait(uint32_t gpu, uint64_t deadline_ns)
{
    nvs_gate *gate = &nvs_gates[gpu];
    uint32_t turn = atomic_load_explicit(&gate->turn, memory_order_seq_cst); /* pairs with nvs_gate_open */
    if (nvs_gate_passes(gpu))
        return true;
    uint64_t now, alert = atomic_load_explicit(&gate->alert_until_ns, memory_order_relaxed); /* a hint */
    if (alert != 0 && (now = nvs_now_ns()) < alert &&
        atomic_exchange_explicit(&gate->watcher, 1, memory_order_relaxed) == 0) { /* relaxed: any thread may watch */
        nvs_futex_wait(&gate->turn, turn, now + NAP_NS < deadline_ns ? now + NAP_NS : deadline_ns);
        atomic_store_explicit(&gate->watcher, 0, memory_order_relaxed);
    } else {
        nvs_futex_wait(&gate->turn, turn, deadline_ns);
    }
    return nvs_gate_passes(gpu);
}

/* A processor takes long to leave a deep sleep state.  A thread that naps keeps its processor out of one. */
void nvs_gate_alert(uint32_t gpu, uint64_t until_ns)
{
    atomic_store_explicit(&nvs_gates[gpu].alert_until_ns, until_ns, memory_order_relaxed); /* a hint */
    if (nvs_gate_waiting(gpu) > 0)
        nvs_gate_kick(gpu);
}

void nvs_gate_kick(uint32_t gpu)
{
    atomic_fetch_add_explicit(&nvs_gates[gpu].turn, 1, memory_order_seq_cst); /* pairs with the load in nvs_gate_wait */
    nvs_futex_wake(&nvs_gates[gpu].turn, INT32_MAX);
}

void nvs_gate_set_dead(uint32_t gpu, bool dead)
{
    atomic_store_explicit(&nvs_gates[gpu].dead, dead, memory_order_seq_cst); /* before the kick: pairs with the loads in nvs_gate_wait */
    if (dead)
        nvs_gate_kick(gpu);
}

void nvs_gate_wait_end(uint32_t gpu)
{
    nvs_slot *slot = nvs_self;
    if (slot == NULL) {
        stop_waiting(gpu);
    } else if (slot->waits != 0) {
        stop_waiting(slot->waits - 1);
        slot->waits = 0;
    }
}

void nvs_start(void)
{
    static atomic_flag begun = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set_explicit(&begun, memory_order_acq_rel)) /* constructors run one after the other */
        return;
    int saved = errno;
    nvs_gate_init();
    nvs_config_read();
    if (nvs_config.enabled)
        nvs_gate_arm();
    errno = saved;
}
