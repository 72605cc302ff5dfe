/* See mailbox.h. */
#include "coord/mailbox.h"

#include "base/process/cancel.h"
#include "base/process/futex.h"

#include <string.h>
#include <unistd.h>

NVS_FORK_STATE nvs_mailbox nvs_mail[NVS_MAX_GPUS];
_Atomic uint64_t nvs_steps;
NVS_FORK_STATE _Atomic int nvs_agent_eventfd = -1;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_poked;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_connected;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_departing;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_departed;

NVS_FORK_STATE _Atomic uint32_t nvs_agent_phase;

void nvs_agent_poke(void)
{
    /* Until the agent runs there is nothing to wake: it looks into every mailbox first.  Read by a write: then either it finds what this
     * thread has left there, as it begins with a write to the same word, or this thread finds it running. */
    if (atomic_load_explicit(&nvs_agent_phase, memory_order_acquire) != NVS_AGENT_RUNNING && /* pairs with begin */
        atomic_fetch_or_explicit(&nvs_agent_phase, 0, memory_order_acq_rel) != NVS_AGENT_RUNNING)
        return;
    /* seq_cst: pairs with the exchange in the agent's loop; who finds 1 knows that the agent will look again. */
    if (atomic_exchange_explicit(&nvs_agent_poked, 1, memory_order_seq_cst) == 0) {
        uint64_t one = 1;
        const int cancel = nvs_cancel_defer(); /* who asks holds a lock */
        ssize_t written = write(atomic_load_explicit(&nvs_agent_eventfd, memory_order_relaxed), &one, sizeof one);
        nvs_cancel_allow(cancel);
        (void)written; /* fails only when the counter is full, and then the agent is awake */
    }
}

void nvs_agent_close_eventfd(void)
{
    const int events = atomic_exchange_explicit(&nvs_agent_eventfd, -1, memory_order_relaxed); /* nobody else is about to use it */
    if (events >= 0)
        close(events);
}

void nvs_question_answer(nvs_question *to, uint32_t sequence, uint64_t bytes)
{
    atomic_store_explicit(&to->answer, bytes, memory_order_relaxed);      /* published by the next line */
    atomic_store_explicit(&to->answered, sequence, memory_order_release); /* pairs with ask() */
    nvs_futex_wake(&to->answered, INT32_MAX);
}

NVS_FORK_CODE void nvs_mailbox_after_fork(void)
{
    static const nvs_mailbox empty;
    nvs_agent_close_eventfd();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (memcmp(&nvs_mail[gpu], &empty, sizeof empty) != 0)
            nvs_mail[gpu] = empty;
    atomic_store_explicit(&nvs_agent_phase, NVS_AGENT_NONE, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_poked, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_connected, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_departing, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_departed, 0, memory_order_relaxed);
}
