/* The gate: one per GPU, in front of every call that submits work.
 *
 * A thread announces itself in its own slot with plain stores.  The thread that closes the gate orders them with
 * membarrier(PRIVATE_EXPEDITED), and then waits for the slots.  The proof is in gate.c.
 *
 * Which entrance when:
 *   nvs_gate_enter_fast, _leave_fast    most submissions: one GPU, its lease held, nobody else on it.  NULL: the next row
 *   nvs_gate_enter, _leave              a submission; waits for the lease
 *   nvs_gate_enter_stoppable            the same where a signal handler or another thread may end the wait: the call then fails
 *   nvs_gate_leave_graph                instead of _leave after a graph, which may be much work
 *   nvs_gate_enter_nowait, _leave_nowait  a call that submits nothing but that a drain must wait for: the end of a context, a stream, a pool
 *   nvs_gate_enter_host                 the thread of a host function of the application: it passes all gates, and nobody waits for it
 *   nvs_query_enter, nvs_gate_awaited   a call that asks what the card writes: stopped only while the process is parked
 *   nvs_gate_await, nvs_gate_awaited    the same for a call that waits for work of a GPU
 * The functions that end in _slow are the slow paths of these.  The agent's own: arm, open, close, queries_close, queries_open.
 *
 * Linked GPUs reach each other's memory, or share a graph: their gates close together, and open only when all of them may.
 *
 * Non-goals: messages, leases, CUDA contexts; more work on the fast path.
 */
#ifndef NVS_GATE_H
#define NVS_GATE_H

#include "base/hot.h"

enum {
    NVS_GATE_OPEN = 0u,   /* calls pass at full speed; nvs_pace_after sees one in `stride` */
    NVS_GATE_CLOSED = 1u, /* no lease: callers wait */
    NVS_GATE_PACED = 2u,  /* lease held, and other programs use this GPU too: nvs_pace_after sees each submission */
    NVS_GATE_FENCED = 4u, /* flag: without membarrier each call has its own fences */
};

typedef struct nvs_gate { /* its state word is in nvs_hot */
    _Alignas(64) _Atomic uint32_t turn; /* futex: changes when waiters must read the gate again */
    _Atomic uint32_t waiting; /* threads that wait at the gate */
    _Atomic uint32_t left;    /* futex: changes when a thread leaves a gate that is being closed */
    _Atomic uint32_t watcher; /* 1: a waiting thread naps instead of sleeping, until alert_until_ns */
    _Atomic uint64_t alert_until_ns;
    _Atomic bool dead; /* calls pass though the gate is closed: the driver refuses all of them (contexts/context.c) */
} nvs_gate;

extern nvs_gate nvs_gates[NVS_MAX_GPUS];
extern _Thread_local nvs_slot *nvs_self __attribute__((tls_model("initial-exec")));

/* The linked GPUs, a bit each; futex.  The agent thread writes it while their gates are closed; GPUs never leave it. */
extern _Atomic uint32_t nvs_gate_links;

/* A bit for each GPU whose gate closes with this one's, itself among them.  Acquire: pairs with the agent's release. */
static inline uint32_t nvs_gate_linked_with(uint32_t gpu)
{
    const uint32_t links = atomic_load_explicit(&nvs_gate_links, memory_order_acquire), own = UINT32_C(1) << gpu;
    return (links & own) != 0 ? links : own;
}

bool nvs_gate_passes(uint32_t gpu);                         /* a caller need not wait */
uint32_t nvs_gate_waiting(uint32_t gpu);                    /* threads that wait at the gate */

/* The wait at the gate (base/base.h).  begin returns true for the first thread.  A thread counts once, even if it begins again: a signal handler may
 * wait within a wait, or jump out of one. */
bool nvs_gate_wait_begin(uint32_t gpu);
bool nvs_gate_wait(uint32_t gpu, uint64_t deadline_ns);     /* one sleep; true when the gate is not closed any more */
void nvs_gate_alert(uint32_t gpu, uint64_t until_ns);       /* the gate opens soon: one waiting thread naps */
void nvs_gate_kick(uint32_t gpu);                           /* wakes the waiting threads */
void nvs_gate_wait_end(uint32_t gpu);

/* Dead: all contexts of this process on the GPU are dead.  Calls then need no lease, and get the driver's error. */
void nvs_gate_set_dead(uint32_t gpu, bool dead);
static inline bool nvs_gate_dead(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_gates[gpu].dead, memory_order_seq_cst); /* pairs with nvs_gate_set_dead */
}

enum {
    NVS_FIRST_STRIDE = 4u,  /* of a new thread: pacing measures its first work early */
    NVS_GRAPH_STRIDE = 16u, /* an update can make a graph far longer */
};

nvs_slot *nvs_slot_register(void);                         /* NULL when the host has no memory: the call goes ungated */
void nvs_gate_enter_slow(nvs_slot *slot, uint32_t gpu);    /* returns with the slot announced and the gate not closed */

bool nvs_gate_enter_stoppable_slow(nvs_slot *slot, uint32_t gpu); /* false: the wait was stopped; the slot is not announced */

bool nvs_gate_leave_slow(nvs_slot *slot, uint32_t gpu);    /* wakes the closer; true: the caller calls nvs_pace_after */

#define NVS_STOPPED_RESULT CUDA_ERROR_OPERATING_SYSTEM /* the result of a call whose wait was stopped (docs/decisions/interrupted-waits.md) */

static inline __attribute__((always_inline)) nvs_slot *nvs_gate_enter_by(uint32_t gpu, bool *stopped)
{
    nvs_slot *slot = nvs_self;
    if (NVS_UNLIKELY(gpu == NVS_NO_GPU))
        return NULL;
    if (NVS_UNLIKELY(slot == NULL) && (slot = nvs_slot_register()) == NULL)
        return NULL;
    if (NVS_UNLIKELY(atomic_load_explicit(&slot->active, memory_order_relaxed) != 0)) /* written by this thread only */
        return NULL; /* already inside: never wait for a lease while holding the gate */
    /* Pairs with the membarrier in nvs_gate_close: either the closer sees `active`, or this thread sees CLOSED. */
    atomic_store_explicit(&slot->active, gpu + 1, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_acquire) & (NVS_GATE_CLOSED | NVS_GATE_FENCED))) {
        if (stopped == NULL)
            nvs_gate_enter_slow(slot, gpu);
        else
            *stopped = !nvs_gate_enter_stoppable_slow(slot, gpu);
    }
    return slot;
}

/* Before a submission.  The result goes to nvs_gate_leave.  gpu is < NVS_MAX_GPUS or NVS_NO_GPU. */
static inline nvs_slot *nvs_gate_enter(uint32_t gpu)
{
    return nvs_gate_enter_by(gpu, NULL);
}

/* The same.  `stopped` is false before.  If it is true after, the call fails with NVS_STOPPED_RESULT and does not leave the gate. */
static inline __attribute__((always_inline)) nvs_slot *nvs_gate_enter_stoppable(uint32_t gpu, bool *stopped)
{
    return nvs_gate_enter_by(gpu, stopped);
}

/* The fast path of nvs_gate_leave.  True: nvs_gate_leave_slow is needed. */
static inline __attribute__((always_inline)) bool nvs_gate_leave_fast(nvs_slot *slot, uint32_t gpu)
{
    atomic_store_explicit(&slot->calls[gpu], atomic_load_explicit(&slot->calls[gpu], memory_order_relaxed) + 1,
                          memory_order_relaxed);
    /* Pairs with the acquire loads in nvs_gate_close: the call happened before the closer goes on. */
    atomic_store_explicit(&slot->active, 0, memory_order_release);
    /* As in nvs_gate_enter: either the closer sees 0, or this thread sees CLOSED and wakes it. */
    atomic_signal_fence(memory_order_seq_cst);
    const bool look = --slot->pace.countdown == 0;
    return NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.gates[gpu], memory_order_relaxed) != NVS_GATE_OPEN) || NVS_UNLIKELY(look);
}

/* After a submission.  True: the caller calls nvs_pace_after. */
static inline bool nvs_gate_leave(nvs_slot *slot, uint32_t gpu)
{
    return NVS_LIKELY(slot != NULL) && nvs_gate_leave_fast(slot, gpu) && nvs_gate_leave_slow(slot, gpu);
}

/* Enters the gate, open or not: for a call that submits nothing, but that closers wait for.  NULL: already inside a gate, or no host memory. */
nvs_slot *nvs_gate_enter_nowait(uint32_t gpu);
void nvs_gate_leave_nowait(nvs_slot *slot);

/* Before a host function of the application, whose thread then passes all gates until nvs_gate_leave_nowait.  No closer waits for it. */
nvs_slot *nvs_gate_enter_host(void);
/* Between nvs_gate_enter_nowait and its end: the lease is held, since the gate is open, or a call that had passed it is still inside. */
bool nvs_gate_lets_on(uint32_t gpu);

/* After the launch of a graph, which may be much work.  Pacing looks at each launch of another graph than the last, and at one in
 * NVS_GRAPH_STRIDE of the same graph. */
static inline bool nvs_gate_leave_graph(nvs_slot *slot, uint32_t gpu, const void *graph)
{
    if (NVS_LIKELY(slot != NULL) && (slot->graph != graph || slot->graph_left <= 1)) {
        slot->graph = graph;
        slot->graph_left = NVS_GRAPH_STRIDE;
        slot->pace.stride -= slot->pace.countdown - 1; /* keeps the difference: the unseen submissions */
        slot->pace.countdown = 1;
    } else if (slot != NULL) {
        slot->graph_left--;
    }
    return nvs_gate_leave(slot, gpu);
}

/* --- the fast path of most calls: nvs_gate_enter_fast, the call, nvs_gate_leave_fast.  For a process that sees one GPU (number 0), holds its lease,
 * and shares the GPU with no other program.  NULL: nothing has changed; use the functions above. --- */

#if defined(__x86_64__) && !defined(__ILP32__)
#define NVS_SELF_BY_SEGMENT 1
#endif

/* From now on the process is known to see one GPU, number 0. */
static inline void nvs_gate_single_gpu(void)
{
#ifdef NVS_SELF_BY_SEGMENT
    char *thread;
    __asm__("movq %%fs:0, %0" : "=r"(thread)); /* the ABI: the first word at the thread pointer is the thread pointer */
    atomic_store_explicit(&nvs_hot.self, (char *)&nvs_self - thread, memory_order_relaxed); /* see its declaration */
#endif
    atomic_store_explicit(&nvs_hot.only_gpu, 0, memory_order_relaxed); /* as above */
}

/* nvs_self, without a load of its offset from another page (the GOT).  Also NULL unless the process sees exactly one GPU. */
static inline __attribute__((always_inline)) nvs_slot *nvs_self_fast(void)
{
#ifdef NVS_SELF_BY_SEGMENT
    nvs_slot *slot;
    const intptr_t self = atomic_load_explicit(&nvs_hot.self, memory_order_relaxed); /* see its declaration */
    if (NVS_UNLIKELY(self == 0))
        return NULL;
    __asm__ volatile("movq %%fs:(%1), %0" : "=r"(slot) : "r"(self)); /* the ABI: the base of %fs is the thread pointer */
    return slot;
#else
    return NVS_LIKELY(nvs_only_gpu() == 0) ? nvs_self : NULL;
#endif
}

/* `graph`: the graph to launch, or NULL. */
static inline __attribute__((always_inline)) nvs_slot *nvs_gate_enter_fast(const void *graph)
{
    nvs_slot *slot = nvs_self_fast();
    if (NVS_UNLIKELY(slot == NULL) ||
        NVS_UNLIKELY(atomic_load_explicit(&slot->active, memory_order_relaxed) != 0)) /* written by this thread only */
        return NULL;
    if (graph != NULL) {
        if (NVS_UNLIKELY(slot->graph != graph) || NVS_UNLIKELY(slot->graph_left <= 1))
            return NULL;
        slot->graph_left--;
    }
    /* As in nvs_gate_enter.  The slow path wakes a closer that has seen the slot active. */
    atomic_store_explicit(&slot->active, 1, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    if (NVS_LIKELY(atomic_load_explicit(&nvs_hot.gates[0], memory_order_acquire) == NVS_GATE_OPEN))
        return slot;
    atomic_store_explicit(&slot->active, 0, memory_order_release);
    return NULL;
}

/* --- queries, and waits for work: calls that read what the card writes, and pass no gate.  While the process is parked they wait for a lease
 * (coord/parking.c). --- */

void nvs_query_enter_slow(nvs_slot *slot, uint32_t awaiting); /* returns with the slot announced, and the process not parked */
bool nvs_queries_close(uint32_t gpu, uint64_t deadline_ns);   /* later ones wait; false: a call is inside, or the kernel lacks membarrier */
void nvs_queries_open(void);
uint32_t nvs_queries_gpu(void);                               /* whose lease they wait for */

static inline nvs_slot *nvs_query_enter_as(uint32_t awaiting)
{
    nvs_slot *slot = nvs_self;
    if ((slot == NULL && (slot = nvs_slot_register()) == NULL) ||
        NVS_UNLIKELY(atomic_load_explicit(&slot->awaiting, memory_order_relaxed) != 0)) /* a signal handler; written by this thread only */
        return NULL;
    /* Pairs with the membarrier in nvs_queries_close, as nvs_gate_enter with that of nvs_gate_close. */
    atomic_store_explicit(&slot->awaiting, awaiting, memory_order_relaxed);
    atomic_signal_fence(memory_order_seq_cst);
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.parked, memory_order_acquire) != 0))
        nvs_query_enter_slow(slot, awaiting);
    return slot;
}

/* Around a call that only asks. */
static inline nvs_slot *nvs_query_enter(void)
{
    return nvs_query_enter_as(NVS_ASKING);
}

/* Around a call that waits for work of this GPU, which the agent samples. */
static inline nvs_slot *nvs_gate_await(uint32_t gpu)
{
    return nvs_query_enter_as(NVS_UNLIKELY(gpu == NVS_NO_GPU) ? NVS_ASKING : gpu + 1);
}

static inline void nvs_gate_awaited(nvs_slot *slot)
{
    if (NVS_LIKELY(slot != NULL))
        atomic_store_explicit(&slot->awaiting, 0, memory_order_release); /* pairs with nvs_queries_close */
}

/* Returns this thread's submissions that pacing has not seen; it looks again after `stride` more. */
static inline uint32_t nvs_gate_unseen(nvs_slot *slot, uint32_t stride)
{
    const uint32_t count = slot->pace.unseen + (slot->pace.stride - slot->pace.countdown);
    slot->pace.unseen = 0;
    slot->pace.stride = slot->pace.countdown = stride;
    return count;
}

void nvs_gate_init(void);                                   /* all gates open: until nvs_gate_arm the hook is inert */
void nvs_gate_arm(void);                                    /* all gates closed: from now on a lease is needed */
void nvs_gate_open(uint32_t gpu, bool paced);               /* also switches an open gate between open and paced */
nvs_status nvs_gate_close(uint32_t gpu, uint64_t deadline_ns); /* and those of linked GPUs: new calls wait; returns when all inside have left, or timed out */
uint64_t nvs_gate_calls(uint32_t gpu);                      /* gated calls since the start */
bool nvs_gate_inside(uint32_t gpu);                         /* a thread is in a gated call now */
bool nvs_gate_in_use(uint32_t gpu);                         /* or in a call that waits for the GPU's work, or at the gate */

void nvs_gate_after_fork(void);                             /* in the child */

/* Reads the environment and arms the gates; idempotent.  The constructor calls it, and entry points that another library's constructor may call first. */
void nvs_start(void);

#endif
