/* See thread.h. */
#include "thread.h"

#include <signal.h>
#include <stddef.h>

int nvs_thread_start(pthread_t *thread, void *(*role)(void *), void *argument)
{
    sigset_t all, before;
    pthread_t made;
    sigfillset(&all);
    int failed = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (failed != 0)
        return failed;
    failed = pthread_create(&made, NULL, role, argument);
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed == 0 && thread != NULL)
        *thread = made;
    else if (failed == 0)
        (void)pthread_detach(made);
    return failed;
}
