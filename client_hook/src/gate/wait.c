/* See wait.h. */
#include "gate/wait.h"

#include "base/clock.h"
#include "base/hot.h"
#include "base/process/futex.h"

enum { NAP_NS = 25000 };

NVS_FORK_STATE nvs_gate nvs_gates[NVS_MAX_GPUS];
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
