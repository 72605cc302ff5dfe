/* Threads of our own in somebody's process.
 *
 * Non-goals: what they do.
 */
#ifndef NVS_THREAD_H
#define NVS_THREAD_H

#include <pthread.h>
#include <stdbool.h>

/* Starts one that takes no signals: they are the application's.  `thread` NULL: it is detached.  0, or an errno. */
int nvs_thread_start(pthread_t *thread, void *(*role)(void *), void *argument);

/* Is the calling thread one of ours? */
bool nvs_thread_is_own(void);

#endif
