/* See fork.h. */
#include "base/process/fork.h"

#include "base/base.h"
#include "base/log.h"

#include <errno.h>
#include <pthread.h>

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
