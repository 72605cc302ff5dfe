/* See thread.h. */
#include "base/process/thread.h"

#include <errno.h>
#include <signal.h>
#include <stdlib.h>

typedef struct beginning {
    void *(*role)(void *);
    void *argument;
} beginning;

static _Thread_local bool own;

static void *begin(void *first)
{
    const beginning what = *(beginning *)first;
    free(first);
    own = true;
    return what.role(what.argument);
}

bool nvs_thread_is_own(void)
{
    return own;
}

int nvs_thread_start(pthread_t *thread, void *(*role)(void *), void *argument)
{
    sigset_t all, before;
    pthread_t made;
    beginning *first = malloc(sizeof *first);
    if (first == NULL)
        return ENOMEM;
    *first = (beginning){role, argument};
    sigfillset(&all);
    int failed = pthread_sigmask(SIG_SETMASK, &all, &before);
    if (failed == 0) {
        failed = pthread_create(&made, NULL, begin, first);
        (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
    }
    if (failed != 0)
        free(first);
    if (failed == 0 && thread != NULL)
        *thread = made;
    else if (failed == 0)
        (void)pthread_detach(made);
    return failed;
}
