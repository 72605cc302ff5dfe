/* What the application's threads and the agent thread share.
 *
 * Threads leave their requests in the mailbox and poke the agent; it leaves its answers there and wakes a futex.  State that only the agent
 * touches is in loop.c and lease.c.
 */
#ifndef NVS_MAILBOX_H
#define NVS_MAILBOX_H

#include "contexts/gpu.h"

#include <pthread.h>
#include <stdatomic.h>

#define NVS_FIRST_ANSWER_NS 2000000000u /* how long the first use of a GPU, or a question, waits for a coordinator */

enum { NVS_FACTS_NONE = 0, NVS_FACTS_ASKING, NVS_FACTS_KNOWN, NVS_FACTS_FAILED };

typedef struct nvs_question { /* a request for so many bytes in all */
    pthread_mutex_t asking;    /* one at a time; "agent mailbox" in the lock order of base/base.h */
    _Atomic uint64_t bytes;    /* written before `asked` */
    _Atomic uint64_t lacking;  /* likewise: the driver had no memory for this much of it */
    _Atomic uint32_t asked;    /* number of the question; 0: none ever.  Release, pairs with the agent's acquire */
    _Atomic uint32_t answered; /* futex: number of the question answered.  Release, pairs with the asker's acquire */
    _Atomic uint64_t answer;   /* the coordinator's, in bytes; written before `answered` */
    uint32_t sent, heard;      /* of the agent thread, on this connection: numbers of the newest that was sent, and that the coordinator has answered */
} nvs_question;

typedef struct nvs_mailbox {
    _Atomic uint32_t facts_state; /* futex; release when KNOWN, acquire before facts are read */
    nvs_gpu_facts facts;

    _Atomic uint32_t settled;     /* futex: 1 once settings have come, or will never come */
    _Atomic uint32_t waited;      /* a thread has waited for them */

    _Atomic uint32_t yield;          /* 1: nvshare_yield */
    _Atomic uint32_t reopen;         /* 1: the gate is to close for a moment */

    _Atomic uint32_t stopped;        /* 1: a signal handler has ended a wait, which is logged */

    nvs_question reserve, pins;
    _Atomic uint32_t ask_pins;       /* 1: the settings require `pins`.  Relaxed: a hint */

    _Atomic uint64_t released_bytes; /* of nvshare_released.  Relaxed: a sum */

    /* For nvshare_gpu_state; relaxed: nothing else depends on them. */
    _Atomic uint32_t shown_state;
    _Atomic uint32_t shown_waiters;
    _Atomic uint64_t shown_lease;
} nvs_mailbox;

extern nvs_mailbox nvs_mail[NVS_MAX_GPUS];
extern _Atomic uint64_t nvs_steps;           /* calls of nvshare_step.  Relaxed: a count */
extern _Atomic uint64_t nvs_pressure_times;  /* of nvshare_pressure; the agent thread writes.  Relaxed: a count */
extern _Atomic uint32_t nvs_pressure_gpus;   /* a bit for each GPU that the coordinator expects evictions on.  Relaxed: a hint */
extern _Atomic uint32_t nvs_agent_poked;     /* 1: the eventfd was written since the agent last looked */
extern _Atomic uint32_t nvs_agent_connected; /* the coordinator has accepted the connection */
extern _Atomic uint32_t nvs_agent_departing; /* exit() was called */
extern _Atomic uint32_t nvs_agent_departed;  /* futex: the agent makes no more calls */
void *nvs_agent_main(void *nothing);         /* the agent thread (loop.c) */

enum { NVS_AGENT_NONE, NVS_AGENT_STARTING, NVS_AGENT_RUNNING, NVS_AGENT_FAILED };
extern _Atomic uint32_t nvs_agent_phase; /* RUNNING is released after what the agent needs, acquired by pokers */

extern _Atomic uint32_t nvs_links_wanted; /* a bit for each GPU that nvs_agent_link names.  Release, pairs with the agent's acquire */

void nvs_agent_poke(void);
int nvs_agent_eventfd(bool make);  /* -1: none, or the program has closed it */
void nvs_agent_close_eventfd(void);
/* An application's thread.  OK: the coordinator grants so many bytes in all; UNAVAILABLE: no answer in time. */
nvs_status nvs_question_ask(nvs_question *of, uint64_t total_bytes, uint64_t lacking_bytes);
void nvs_question_answer(nvs_question *to, uint32_t sequence, uint64_t bytes); /* agent thread */
void nvs_pressure_expect(uint32_t gpu, bool evictions); /* agent thread */
void nvs_mailbox_after_fork(void); /* in the child: no agent, and no requests */

#endif
