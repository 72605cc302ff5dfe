/* See budget.h. */
#include "coord/memory/budget.h"

#include "base/clock.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process/futex.h"
#include "coord/mailbox.h"
#include "coord/protocol/link.h"
#include "gate/gate.h"
#include "host/pool.h"

#include <errno.h>

#define ANSWER_NS 2000000000u

NVS_FORK_STATE static struct {
    pthread_mutex_t asking;    /* one question at a time; "agent mailbox" in the lock order of base/base.h */
    _Atomic uint64_t bytes;    /* wanted in all; written before `asked` */
    _Atomic uint32_t asked;    /* number of the question.  Release, pairs with the agent's acquire */
    _Atomic uint32_t answered; /* futex: number of the question that was answered.  Release, pairs with the asker's acquire */
} mail = {.asking = PTHREAD_MUTEX_INITIALIZER};

/* Of the agent thread. */
NVS_FORK_STATE static enum { NO_BUDGET, ASKED, BUDGET } state;
NVS_FORK_STATE static uint32_t sequence;       /* of the last message */
NVS_FORK_STATE static uint32_t question;       /* of the mailbox that it carried, or an earlier one did */
NVS_FORK_STATE static uint64_t unanswered_ns;  /* since when; 0: nothing is */

/* --- an application's thread --- */

void nvs_agent_reserve_host(uint64_t total_bytes)
{
    int saved = errno;
    if (atomic_load_explicit(&nvs_agent_connected, memory_order_relaxed) != 0) { /* a hint: without it nobody answers */
        pthread_mutex_lock(&mail.asking);
        uint32_t mine = atomic_load_explicit(&mail.asked, memory_order_relaxed) + 1; /* under the mutex */
        uint64_t until = nvs_now_ns() + 2 * (uint64_t)ANSWER_NS;
        atomic_store_explicit(&mail.bytes, total_bytes, memory_order_relaxed); /* published by the next line */
        atomic_store_explicit(&mail.asked, mine, memory_order_release);        /* pairs with the agent's acquire */
        nvs_agent_poke();
        for (;;) {
            uint32_t answered = atomic_load_explicit(&mail.answered, memory_order_acquire); /* the agent's release */
            if (answered == mine || nvs_now_ns() >= until ||
                atomic_load_explicit(&nvs_agent_departing, memory_order_relaxed)) /* a hint: we wait no longer than that */
                break;
            nvs_futex_wait(&mail.answered, answered, until);
        }
        pthread_mutex_unlock(&mail.asking);
    }
    errno = saved;
}

/* --- the agent thread --- */

static void answered(void)
{
    atomic_store_explicit(&mail.answered, question, memory_order_release); /* pairs with the asker's acquire */
    nvs_futex_wake(&mail.answered, INT32_MAX);
}

static void send(uint64_t bytes)
{
    NVS_LINK_SEND(reserve_host, ++sequence, bytes);
    unanswered_ns = nvs_now_ns();
}

static void no_budget(void)
{
    state = NO_BUDGET;
    unanswered_ns = 0;
    nvs_host_set_share(false, 0);
    answered();
}

void nvs_budget_connected(void)
{
    if (nvs_config.memory_mode != NVS_MODE_SWAP)
        return;
    state = ASKED;
    nvs_host_set_share(true, 0); /* who allocates before the answer asks too */
    send(nvs_host_share_in_use());
}

void nvs_budget_lost(void)
{
    if (state != NO_BUDGET)
        no_budget();
}

void nvs_budget_answer(const nvs_host_reserved *answer)
{
    if (answer->sequence != sequence || state == NO_BUDGET)
        return; /* a newer question is under way */
    state = BUDGET;
    unanswered_ns = 0;
    nvs_host_set_share(true, answer->bytes);
    answered();
}

bool nvs_budget_rejected(void)
{
    if (state != ASKED || unanswered_ns == 0)
        return false;
    nvs_log(NVS_LOG_INFO, "the coordinator has no budget of host memory");
    no_budget();
    return true;
}

uint64_t nvs_budget_serve(uint64_t now_ns)
{
    uint32_t asked = atomic_load_explicit(&mail.asked, memory_order_acquire); /* pairs with nvs_agent_reserve_host */
    uint64_t keep;
    if (asked != question) {
        question = asked;
        if (state != NO_BUDGET)
            send(atomic_load_explicit(&mail.bytes, memory_order_relaxed)); /* the acquire above */
        else
            answered();
    }
    if (state == BUDGET && unanswered_ns == 0 && nvs_host_spare_share(&keep))
        send(keep);
    if (unanswered_ns == 0)
        return UINT64_MAX;
    if (now_ns >= unanswered_ns && now_ns - unanswered_ns >= ANSWER_NS) {
        nvs_log(NVS_LOG_INFO, "no answer about host memory; going on without a budget");
        no_budget();
        return UINT64_MAX;
    }
    return unanswered_ns + ANSWER_NS;
}

NVS_FORK_CODE void nvs_budget_after_fork(void)
{
    pthread_mutex_init(&mail.asking, NULL); /* a thread that does not exist here may have held it */
    atomic_store_explicit(&mail.asked, 0, memory_order_relaxed);
    atomic_store_explicit(&mail.answered, 0, memory_order_relaxed);
    state = NO_BUDGET;
    sequence = question = 0;
    unanswered_ns = 0;
}
