/* See budget.h. */
#include "coord/memory/budget.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "coord/mailbox.h"
#include "coord/protocol/link.h"
#include "host/pool.h"

#include <errno.h>

#define ANSWER_NS 2000000000u

NVS_FORK_STATE static nvs_question mail = {.asking = PTHREAD_MUTEX_INITIALIZER};

/* Of the agent thread. */
NVS_FORK_STATE static enum { NO_BUDGET, ASKED, BUDGET } state;
NVS_FORK_STATE static uint32_t sequence;       /* of the last message */
NVS_FORK_STATE static uint32_t question;       /* the newest of the mailbox that was sent */
NVS_FORK_STATE static uint64_t unanswered_ns;  /* since when a message has no answer; 0: all have */

/* --- an application's thread --- */

void nvs_agent_reserve_host(uint64_t total_bytes)
{
    int saved = errno;
    if (atomic_load_explicit(&nvs_agent_connected, memory_order_relaxed) != 0) /* a hint: without a connection nobody answers */
        (void)nvs_question_ask(&mail, total_bytes);
    errno = saved;
}

/* --- the agent thread --- */

static void answered(void)
{
    nvs_question_answer(&mail, question, UINT64_MAX);
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
    nvs_host_set_share(true, 0); /* allocations before the answer ask too */
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
        return; /* a newer one is under way */
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
    uint32_t asked = atomic_load_explicit(&mail.asked, memory_order_acquire); /* pairs with nvs_question_ask */
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
