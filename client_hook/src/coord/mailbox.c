/* See mailbox.h. */
#define _GNU_SOURCE /* syscall */
#include "coord/mailbox.h"

#include "base/log.h"
#include "base/process.h"
#include "base/system.h"

#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define ANSWER_NS 10000000000u /* how long a connected coordinator may take for an answer */
#define ROOM_NS 60000000000u   /* ... while idle programs leave the card: longer than its own deadline, `move_deadline` */

NVS_FORK_STATE nvs_mailbox nvs_mail[NVS_MAX_GPUS];
_Atomic uint64_t nvs_steps;
NVS_FORK_STATE _Atomic uint64_t nvs_pressure_times;
NVS_FORK_STATE _Atomic uint32_t nvs_pressure_gpus;
NVS_FORK_STATE static _Atomic int eventfd_number = -1; /* relaxed: read after the agent was seen running, and in a fork's child */
static _Atomic uint64_t eventfd_file;                  /* relaxed: the same for all eventfds */
NVS_FORK_STATE _Atomic uint32_t nvs_links_wanted;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_poked;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_connected;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_departing;
NVS_FORK_STATE _Atomic uint32_t nvs_agent_departed;

NVS_FORK_STATE _Atomic uint32_t nvs_agent_phase;

void nvs_agent_poke(void)
{
    /* A starting agent reads every mailbox, and needs no wake-up.  The read-modify-write pairs with the agent's exchange of the same word: either the agent
     * sees this thread's request, or this thread sees the agent running. */
    if (atomic_load_explicit(&nvs_agent_phase, memory_order_acquire) != NVS_AGENT_RUNNING && /* pairs with begin */
        atomic_fetch_or_explicit(&nvs_agent_phase, 0, memory_order_acq_rel) != NVS_AGENT_RUNNING)
        return;
    /* seq_cst: pairs with the exchange in the agent's loop.  1: the agent will read the mailboxes again. */
    if (atomic_exchange_explicit(&nvs_agent_poked, 1, memory_order_seq_cst) == 0) {
        uint64_t one = 1;
        const int cancel = nvs_cancel_defer(); /* the caller may hold a lock */
        ssize_t written = write(nvs_agent_eventfd(false), &one, sizeof one);
        nvs_cancel_allow(cancel);
        (void)written; /* fails when the counter is full, and then the agent is awake; without an eventfd the agent looks later (loop.c) */
    }
}

/* A high descriptor makes the kernel grow the table of descriptors.  In a process with several threads that takes 7 to 19 ms
 * (docs/decisions/connect-at-cuinit.md), and no thread of the application may wait for it. */
int nvs_agent_eventfd(bool make)
{
    int events = atomic_load_explicit(&eventfd_number, memory_order_relaxed); /* see its declaration */
    if (events >= 0 && nvs_descriptor_file(events) == atomic_load_explicit(&eventfd_file, memory_order_relaxed))
        return events;
    if (!make)
        return -1;
    if (events >= 0)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this program closes descriptors that it has not opened; it will answer a little later");
    events = nvs_descriptor_aside(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    atomic_store_explicit(&eventfd_file, nvs_descriptor_file(events), memory_order_relaxed);
    atomic_store_explicit(&eventfd_number, events, memory_order_relaxed);
    return events;
}

void nvs_agent_close_eventfd(void)
{
    const int events = nvs_agent_eventfd(false);
    atomic_store_explicit(&eventfd_number, -1, memory_order_relaxed); /* no other thread uses it */
    if (events >= 0)
        close(events);
}

nvs_status nvs_question_ask(nvs_question *of, uint64_t total_bytes, uint64_t lacking_bytes)
{
    nvs_status status = NVS_UNAVAILABLE;
    if (atomic_load_explicit(&nvs_agent_departing, memory_order_relaxed) != 0) /* else behind a thread that still waits for an answer */
        return status;
    pthread_mutex_lock(&of->asking);
    const uint64_t begin = nvs_now_ns(), patience = lacking_bytes != 0 ? ROOM_NS : ANSWER_NS;
    uint32_t question = atomic_load_explicit(&of->asked, memory_order_relaxed) + 1; /* changes under the mutex */
    question += question == 0;
    atomic_store_explicit(&of->bytes, total_bytes, memory_order_relaxed); /* both are published by the store of `asked` */
    atomic_store_explicit(&of->lacking, lacking_bytes, memory_order_relaxed);
    atomic_store_explicit(&of->asked, question, memory_order_release);    /* pairs with newest() in state.c */
    nvs_agent_poke();
    for (;;) {
        const uint32_t answered = atomic_load_explicit(&of->answered, memory_order_acquire); /* the agent's release */
        const uint64_t now = nvs_now_ns();
        if (answered == question) {
            status = atomic_load_explicit(&of->answer, memory_order_relaxed) >= total_bytes ? NVS_OK : NVS_REFUSED;
            break;
        }
        const bool connected = atomic_load_explicit(&nvs_agent_connected, memory_order_relaxed) != 0;
        if (now >= begin + (connected ? patience : NVS_FIRST_ANSWER_NS) ||
            atomic_load_explicit(&nvs_agent_departing, memory_order_relaxed))
            break;
        nvs_futex_wait(&of->answered, answered, now < begin + NVS_FIRST_ANSWER_NS ? begin + NVS_FIRST_ANSWER_NS : begin + patience);
    }
    pthread_mutex_unlock(&of->asking);
    return status;
}

void nvs_question_answer(nvs_question *to, uint32_t sequence, uint64_t bytes)
{
    atomic_store_explicit(&to->answer, bytes, memory_order_relaxed);      /* published by the next line */
    atomic_store_explicit(&to->answered, sequence, memory_order_release); /* pairs with nvs_question_ask */
    nvs_futex_wake(&to->answered, INT32_MAX);
}

void nvs_pressure_expect(uint32_t gpu, bool evictions)
{
    const uint32_t bit = 1u << gpu, before = atomic_load_explicit(&nvs_pressure_gpus, memory_order_relaxed); /* only the agent writes it */
    if (evictions && (before & bit) == 0)
        (void)atomic_fetch_add_explicit(&nvs_pressure_times, 1, memory_order_relaxed);
    atomic_store_explicit(&nvs_pressure_gpus, evictions ? before | bit : before & ~bit, memory_order_relaxed);
}

NVS_FORK_CODE void nvs_mailbox_after_fork(void)
{
    static const nvs_mailbox empty;
    nvs_agent_close_eventfd();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if (memcmp(&nvs_mail[gpu], &empty, sizeof empty) != 0)
            nvs_mail[gpu] = empty;
    atomic_store_explicit(&nvs_agent_phase, NVS_AGENT_NONE, memory_order_relaxed);
    atomic_store_explicit(&nvs_pressure_times, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_pressure_gpus, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_links_wanted, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_poked, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_connected, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_departing, 0, memory_order_relaxed);
    atomic_store_explicit(&nvs_agent_departed, 0, memory_order_relaxed);
}
