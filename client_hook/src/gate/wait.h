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
    NVS_GATE_FENCED = 4u, /* with any of these: membarrier is not to be had, and each call pays for the ordering itself */
};

typedef struct nvs_gate { /* beside its word in nvs_hot */
    _Alignas(64) _Atomic uint32_t turn; /* futex word: changes whenever waiters must look again */
    _Atomic uint32_t waiting; /* threads asleep before the gate */
    _Atomic uint32_t left;    /* futex word: changes when a thread leaves while somebody closes */
    _Atomic uint32_t watcher; /* one waiting thread naps instead of sleeping, while alert_until_ns says so */
    _Atomic uint64_t alert_until_ns;
    _Atomic bool dead; /* calls pass though the gate is closed: the driver refuses all of them (contexts/dead.c) */
} nvs_gate;

extern nvs_gate nvs_gates[NVS_MAX_GPUS];
extern _Thread_local nvs_slot *nvs_self __attribute__((tls_model("initial-exec")));

bool nvs_gate_passes(uint32_t gpu);                         /* a caller need not wait */
uint32_t nvs_gate_waiting(uint32_t gpu);                    /* threads that wait before the gate */

/* Asleep before the gate, as the agent does it (base/port.h): begin tells whether this is the first thread.  A thread counts
 * once however often it begins, so that a signal's handler may wait inside of a wait, or jump out of one. */
bool nvs_gate_wait_begin(uint32_t gpu);
bool nvs_gate_wait(uint32_t gpu, uint64_t deadline_ns);     /* one sleep; true when the gate is not closed any more */
void nvs_gate_alert(uint32_t gpu, uint64_t until_ns);       /* it will open soon: one of those who wait stays awake */
void nvs_gate_kick(uint32_t gpu);                           /* those who sleep before the gate look around */
void nvs_gate_wait_end(uint32_t gpu);

/* No context of this process on the GPU can run work any more, or one can again.  Then calls need no lease: they get the driver's error. */
void nvs_gate_set_dead(uint32_t gpu, bool dead);
static inline bool nvs_gate_dead(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_gates[gpu].dead, memory_order_seq_cst); /* pairs with nvs_gate_set_dead */
}

#endif
