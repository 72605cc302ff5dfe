/* The hook's own threads. */
#ifndef NVS_THREAD_H
#define NVS_THREAD_H

#include <pthread.h>
#include <stdbool.h>

/* Starts a thread that blocks all signals: they are the application's.  `thread` NULL: detached.  0, or an errno. */
int nvs_thread_start(pthread_t *thread, void *(*role)(void *), void *argument);

/* True: the hook started the calling thread. */
bool nvs_thread_is_own(void);

#endif
