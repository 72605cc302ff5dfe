/* See log.h.  One write() a line, no lock, no allocation; errno stays as it was.
 *
 * Non-goals: use on a fast path.
 */
#include "base/log.h"

#include "base/process/cancel.h"
#include "base/process/descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int nvs_log_level = NVS_LOG_WARNING;

static atomic_int file = -1; /* -1: not opened yet */
static atomic_bool ending;   /* relaxed: one more message does no harm */

void nvs_log_ending(void)
{
    atomic_store_explicit(&ending, true, memory_order_relaxed);
}

static int target(void)
{
    int fd = atomic_load_explicit(&file, memory_order_relaxed); /* relaxed: publishes no other data */
    if (fd >= 0)
        return fd;
    const char *path = getenv("NVSHARE_LOG_FILE");
    fd = path != NULL && path[0] != 0 ? nvs_descriptor_aside(open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644)) : -1;
    if (fd < 0)
        fd = STDERR_FILENO;
    int expected = -1;
    if (!atomic_compare_exchange_strong_explicit(&file, &expected, fd, memory_order_relaxed, memory_order_relaxed)) {
        if (fd != STDERR_FILENO)
            close(fd); /* another thread was first */
        fd = expected;
    }
    return fd;
}

/* A slow reader of standard error must not stop the agent. */
static bool takes(int fd)
{
    struct pollfd watched = {.fd = fd, .events = POLLOUT};
    return poll(&watched, 1, 0) == 1 && (watched.revents & POLLOUT) != 0;
}

void nvs_log_notice(const char *format, ...)
{
    static const char head[] = "nvshare: ";
    if (nvs_log_level < NVS_LOG_WARNING || atomic_load_explicit(&ending, memory_order_relaxed) || !takes(STDERR_FILENO))
        return;
    const int saved = errno, cancel = nvs_cancel_defer();
    char line[512];
    memcpy(line, head, sizeof head);
    va_list arguments;
    va_start(arguments, format);
    int body = vsnprintf(line + sizeof head - 1, sizeof line - sizeof head, format, arguments);
    va_end(arguments);
    size_t size = strlen(line);
    if (body >= 0) {
        line[size++] = '\n';
        ssize_t written = write(STDERR_FILENO, line, size);
        (void)written;
    }
    nvs_cancel_allow(cancel);
    errno = saved;
}

void nvs_log(int level, const char *format, ...)
{
    static const char *const names[] = {"", "error", "warning", "info", "debug"};
    if (level > nvs_log_level || level <= NVS_LOG_OFF || level > NVS_LOG_DEBUG)
        return;
    if (level == NVS_LOG_WARNING && nvs_log_level == NVS_LOG_WARNING && atomic_load_explicit(&ending, memory_order_relaxed))
        return;
    const int saved = errno, cancel = nvs_cancel_defer(); /* a cancelled caller would keep its locks */
    char line[512];
    int head = snprintf(line, sizeof line, "nvshare[%ld] %s: ", (long)getpid(), names[level]);
    if (head > 0 && (size_t)head < sizeof line - 2) {
        va_list arguments;
        va_start(arguments, format);
        int body = vsnprintf(line + head, sizeof line - 1 - (size_t)head, format, arguments);
        va_end(arguments);
        size_t size = strlen(line);
        if (body >= 0) {
            line[size++] = '\n';
            ssize_t written = write(target(), line, size);
            (void)written; /* a failed write cannot be reported */
        }
    }
    nvs_cancel_allow(cancel);
    errno = saved;
}
