/* See log.h.  One write() a line, no lock, no allocation; errno stays as it was.  A line that its reader does not take at once is lost.
 *
 * A FIFO is opened and written without waiting: without a reader, lines go to standard error.
 *
 * Non-goals: use on a fast path.
 */
#define _GNU_SOURCE /* secure_getenv */
#include "base/log.h"

#include "base/system.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

int nvs_log_level = NVS_LOG_WARNING;

static atomic_int file = -1; /* -1: not opened yet */
static _Atomic uint64_t opened; /* the file behind it; relaxed: the same for every thread */
static atomic_bool ending;   /* relaxed: one more message does no harm */

void nvs_log_ending(void)
{
    atomic_store_explicit(&ending, true, memory_order_relaxed);
}

static int target(void)
{
    int seen = atomic_load_explicit(&file, memory_order_relaxed), fd = seen; /* relaxed: publishes no other data */
    if (fd == STDERR_FILENO || (fd >= 0 && nvs_descriptor_file(fd) == atomic_load_explicit(&opened, memory_order_relaxed)))
        return fd;
    const char *path = secure_getenv("NVSHARE_LOG_FILE");
    fd = path != NULL && path[0] != 0 ? nvs_descriptor_aside(open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644)) : -1;
    if (fd < 0)
        fd = STDERR_FILENO;
    else
        atomic_store_explicit(&opened, nvs_descriptor_file(fd), memory_order_relaxed);
    if (!atomic_compare_exchange_strong_explicit(&file, &seen, fd, memory_order_relaxed, memory_order_relaxed)) {
        if (fd != STDERR_FILENO)
            close(fd); /* another thread was first */
        fd = seen;
    }
    return fd;
}

/* The reader may be slow, or have ended: the write neither blocks nor leaves a SIGPIPE. */
static void print(int fd, const char *line, size_t size)
{
    struct pollfd watched = {.fd = fd, .events = POLLOUT};
    sigset_t broken, pending, before;
    if (poll(&watched, 1, 0) != 1 || watched.revents != POLLOUT)
        return;
    sigemptyset(&broken);
    sigaddset(&broken, SIGPIPE);
    (void)pthread_sigmask(SIG_BLOCK, &broken, &before);
    (void)sigpending(&pending);
    if (write(fd, line, size) < 0 && errno == EPIPE && sigismember(&pending, SIGPIPE) == 0)
        (void)sigtimedwait(&broken, NULL, &(struct timespec){0, 0});
    (void)pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void put(int fd, const char *head, const char *format, va_list arguments)
{
    const int saved = errno, cancel = nvs_cancel_defer(); /* a cancelled caller would keep its locks */
    char line[512];
    const int begun = snprintf(line, sizeof line, "%s: ", head);
    if (begun > 0 && vsnprintf(line + begun, sizeof line - 1 - (size_t)begun, format, arguments) >= 0) {
        size_t size = strlen(line);
        line[size++] = '\n';
        print(fd, line, size);
    }
    nvs_cancel_allow(cancel);
    errno = saved;
}

void nvs_log_notice(const char *format, ...)
{
    if (nvs_log_level < NVS_LOG_WARNING || atomic_load_explicit(&ending, memory_order_relaxed))
        return;
    va_list arguments;
    va_start(arguments, format);
    put(STDERR_FILENO, "nvshare", format, arguments);
    va_end(arguments);
}

void nvs_log(int level, const char *format, ...)
{
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    if (level > nvs_log_level || level <= NVS_LOG_OFF || level > NVS_LOG_DEBUG)
        return;
    if (level == NVS_LOG_WARNING && nvs_log_level == NVS_LOG_WARNING && atomic_load_explicit(&ending, memory_order_relaxed))
        return;
    const int saved = errno;
    char head[40];
    va_list arguments;
    (void)snprintf(head, sizeof head, "nvshare[%ld] %s", (long)getpid(), names[level]);
    va_start(arguments, format);
    put(target(), head, format, arguments);
    va_end(arguments);
    errno = saved;
}
