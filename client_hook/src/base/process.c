/* See process.h. */
#include "base/process.h"

#include "base/base.h"
#include "base/log.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>

uint64_t nvs_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

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
    (void)prctl(PR_SET_NAME, "nvshare", 0, 0, 0); /* coord/parking.c tells them from the program's by it */
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

NVS_FORK_CODE static void in_child(void)
{
    int saved = errno;
    for (void (*const *handler)(void) = nvs_fork_handlers; *handler != NULL; handler++)
        (*handler)();
    errno = saved;
}

static void register_handlers(void)
{
    if (pthread_atfork(NULL, NULL, in_child) != 0)
        nvs_log(NVS_LOG_WARNING, "no memory for the fork handler; children of this process must not use CUDA");
}

void nvs_fork_prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT; /* a child inherits the handlers too */
    (void)pthread_once(&once, register_handlers);
}
