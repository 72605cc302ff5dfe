/* The words of each gate, and the threads that sleep before it.
 *
 * Non-goals: closing a gate, and the calls inside of it (gate.h).
 */
#ifndef NVS_WAIT_H
#define NVS_WAIT_H

#include "base/hot.h"

enum {
    NVS_GATE_OPEN = 0u,   /* calls pass at full speed; nvs_pace_after() follows one in `stride` of them */
    NVS_GATE_CLOSED = 1u, /* no lease: callers wait */
    NVS_GATE_PACED = 2u,  /* lease held and others use this GPU too: nvs_pace_after() follows each submission */
    NVS_GATE_FENCED = 4u, /* with any of these: without membarrier each call has fences of its own */
};

typedef struct nvs_gate { /* beside its word in nvs_hot */
    _Alignas(64) _Atomic uint32_t turn; /* futex: changes when waiters must read the gate again */
    _Atomic uint32_t waiting; /* threads asleep before the gate */
    _Atomic uint32_t left;    /* futex: changes when a thread leaves a gate that is being closed */
    _Atomic uint32_t watcher; /* 1: a waiting thread naps instead of sleeping, until alert_until_ns */
    _Atomic uint64_t alert_until_ns;
    _Atomic bool dead; /* calls pass though the gate is closed: the driver refuses all of them (contexts/dead.c) */
} nvs_gate;

extern nvs_gate nvs_gates[NVS_MAX_GPUS];
extern _Thread_local nvs_slot *nvs_self __attribute__((tls_model("initial-exec")));

bool nvs_gate_passes(uint32_t gpu);                         /* a caller need not wait */
uint32_t nvs_gate_waiting(uint32_t gpu);                    /* threads that wait before the gate */

/* The wait before the gate (base/port.h).  begin returns true for the first thread.  A thread counts once, however often it begins: a signal handler may
 * wait inside of a wait, or jump out of one. */
bool nvs_gate_wait_begin(uint32_t gpu);
bool nvs_gate_wait(uint32_t gpu, uint64_t deadline_ns);     /* one sleep; true when the gate is not closed any more */
void nvs_gate_alert(uint32_t gpu, uint64_t until_ns);       /* it will open soon: one waiting thread naps */
void nvs_gate_kick(uint32_t gpu);                           /* wakes the waiting threads */
void nvs_gate_wait_end(uint32_t gpu);

/* Dead: all contexts of this process on the GPU are dead.  Calls then need no lease, and get the driver's error. */
void nvs_gate_set_dead(uint32_t gpu, bool dead);
static inline bool nvs_gate_dead(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_gates[gpu].dead, memory_order_seq_cst); /* pairs with nvs_gate_set_dead */
}

#endif
