/* The state of each gate, and the threads that wait at it.
 *
 * Non-goals: closing a gate, and the calls inside it (gate.h).
 */
#ifndef NVS_WAIT_H
#define NVS_WAIT_H

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
    _Atomic bool dead; /* calls pass though the gate is closed: the driver refuses all of them (contexts/dead.c) */
} nvs_gate;

extern nvs_gate nvs_gates[NVS_MAX_GPUS];
extern _Thread_local nvs_slot *nvs_self __attribute__((tls_model("initial-exec")));

bool nvs_gate_passes(uint32_t gpu);                         /* a caller need not wait */
uint32_t nvs_gate_waiting(uint32_t gpu);                    /* threads that wait at the gate */

/* The wait at the gate (base/port.h).  begin returns true for the first thread.  A thread counts once, even if it begins again: a signal handler may
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

#endif
