/* The clock, the hook's own threads, and the child of a fork. */
#ifndef NVS_PROCESS_H
#define NVS_PROCESS_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

uint64_t nvs_now_ns(void); /* CLOCK_MONOTONIC, the clock of every deadline of the hook */

/* Starts a thread that blocks all signals: they are the application's.  `thread` NULL: detached.  0, or an errno. */
int nvs_thread_start(pthread_t *thread, void *(*role)(void *), void *argument);

/* True: the hook started the calling thread. */
bool nvs_thread_is_own(void);

/* In the child of a fork each part forgets what belongs to the parent.
 *
 * The handlers are registered when the agent starts: before, there is no state that a child must lose.  No handler allocates, or takes a lock.  They write
 * only to variables that the parent has written and that are together (NVS_FORK_STATE), since the kernel copies each page that they touch.
 * They run in this order; NULL ends the list.  init.c
 */
extern void (*const nvs_fork_handlers[])(void) __attribute__((visibility("hidden")));

void nvs_fork_prepare(void); /* idempotent */

#endif
