/* What the application's threads and the agent thread share.
 *
 * Threads leave their requests in the mailbox and poke the agent; it leaves its answers there and wakes a futex.  State that only the agent
 * touches is in loop.c and lease.c.
 */
#ifndef NVS_MAILBOX_H
#define NVS_MAILBOX_H

#include "contexts/gpu_facts.h"

#include <pthread.h>
#include <stdatomic.h>

enum { NVS_FACTS_NONE = 0, NVS_FACTS_ASKING, NVS_FACTS_KNOWN, NVS_FACTS_FAILED };

typedef struct nvs_question { /* may the client have so many bytes in all? */
    pthread_mutex_t asking;    /* one at a time; "agent mailbox" in the lock order of base/base.h */
    _Atomic uint64_t bytes;    /* written before `asked` */
    _Atomic uint32_t asked;    /* number of the question; 0: none ever.  Release, pairs with the agent's acquire */
    _Atomic uint32_t answered; /* futex: number of the question answered.  Release, pairs with the asker's acquire */
    _Atomic uint64_t answer;   /* the coordinator's, in bytes; written before `answered` */
} nvs_question;

typedef struct nvs_mailbox {
    _Atomic uint32_t facts_state; /* futex; release when KNOWN, acquire by who reads facts */
    nvs_gpu_facts facts;

    _Atomic uint32_t settled;     /* futex: 1 once settings have come, or never will */
    _Atomic uint32_t waited;      /* somebody has waited for them once */

    _Atomic uint32_t yield;          /* 1: nvshare_yield */

    _Atomic uint32_t stopped;        /* 1: a signal's handler has ended a wait; the user is told */

    nvs_question reserve, pins;
    _Atomic uint32_t ask_pins;       /* 1: the coordinator wants to be asked for pins.  Relaxed: a hint for who would ask */

    /* For nvshare_gpu_state: figures that stand for themselves, relaxed. */
    _Atomic uint32_t shown_state;
    _Atomic uint32_t shown_waiters;
    _Atomic uint64_t shown_lease;
} nvs_mailbox;

extern nvs_mailbox nvs_mail[NVS_MAX_GPUS];
extern _Atomic uint64_t nvs_steps;           /* calls of nvshare_step.  Relaxed: a count */
extern _Atomic int nvs_agent_eventfd;        /* relaxed: read by who has seen the agent running, and in a fork's child */
extern _Atomic uint32_t nvs_agent_poked;     /* 1: the eventfd was written since the agent last looked */
extern _Atomic uint32_t nvs_agent_connected; /* the coordinator said welcome on the present connection */
extern _Atomic uint32_t nvs_agent_departing; /* exit() was called */
extern _Atomic uint32_t nvs_agent_departed;  /* futex: the agent calls nothing any more */

enum { NVS_AGENT_NONE, NVS_AGENT_STARTING, NVS_AGENT_RUNNING, NVS_AGENT_FAILED };
extern _Atomic uint32_t nvs_agent_phase; /* RUNNING is released after what the agent needs, acquired by pokers */

void nvs_agent_poke(void);
void nvs_agent_close_eventfd(void);
void nvs_question_answer(nvs_question *to, uint32_t sequence, uint64_t bytes); /* agent thread */
void nvs_mailbox_after_fork(void); /* in the child: no agent, and nothing was asked */

#endif
