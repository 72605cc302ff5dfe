/* Cancellation, futexes and descriptors, as the hook may use them in a process of an application.
 *
 * Waits, reads and writes are cancellation points.  A thread that ended in the hook would leave a lock or a half-made change behind, for which other
 * threads wait for ever.  So each wait of the hook defers cancellation: a cancelled thread of the application ends after it.
 */
#ifndef NVS_SYSTEM_H
#define NVS_SYSTEM_H

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Disables cancellation until nvs_cancel_allow, which takes this result. */
static inline int nvs_cancel_defer(void)
{
    int before;
    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void nvs_cancel_allow(int before)
{
    (void)pthread_setcancelstate(before, &before);
}

/* So long from now, by the clock of pthread_cond_timedwait. */
static inline struct timespec nvs_wait_until(uint64_t length_ns)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t end_ns = (uint64_t)now.tv_nsec + length_ns;
    return (struct timespec){now.tv_sec + (time_t)(end_ns / 1000000000u), (long)(end_ns % 1000000000u)};
}

/* As pthread_cond_wait, or pthread_cond_timedwait where `until` is not NULL. */
static inline int nvs_cond_wait(pthread_cond_t *changed, pthread_mutex_t *lock, const struct timespec *until)
{
    const int before = nvs_cancel_defer();
    const int result = until != NULL ? pthread_cond_timedwait(changed, lock, until) : pthread_cond_wait(changed, lock);
    nvs_cancel_allow(before);
    return result;
}

/* Sleeps; less than a second. */
static inline void nvs_nap(long length_ns)
{
    const struct timespec length = {0, length_ns};
    const int before = nvs_cancel_defer();
    (void)nanosleep(&length, NULL);
    nvs_cancel_allow(before);
}

/* A futex with an absolute CLOCK_MONOTONIC deadline; UINT64_MAX: none.  May return early. */
static inline void nvs_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t deadline_ns)
{
    const struct timespec until = {(time_t)(deadline_ns / 1000000000u), (long)(deadline_ns % 1000000000u)};
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET_PRIVATE, expected, deadline_ns == UINT64_MAX ? NULL : &until, NULL, FUTEX_BITSET_MATCH_ANY);
}

static inline void nvs_futex_wake(_Atomic uint32_t *word, int threads)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, threads, NULL, NULL, 0);
}

/* Duplicates `fd` above the application's numbers, else above standard error, as close-on-exec, and closes it; -1 if that fails.
 *
 * An application that uses select() needs small numbers.  An application that closed its standard output must not print into the hook's connection.
 * An application with many descriptors needs most numbers.
 *
 * Not at the top of the limit: the kernel's table is as long as the highest number, and each fork copies it.  select() cannot use numbers from 1024
 * on. */
static inline int nvs_descriptor_aside(int fd)
{
    enum { HIGHEST = 16384, BEYOND_SELECT = 1024 };
    struct rlimit limit;
    rlim_t from = 3;
    if (fd < 0)
        return fd;
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
        from = limit.rlim_cur > HIGHEST ? HIGHEST : limit.rlim_cur;
        from -= from / 4;
        from = from < BEYOND_SELECT ? from : BEYOND_SELECT;
    }
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, from < 3 ? 3 : (int)from);
    if (moved < 0 && fd > 2)
        return fd;
    if (moved < 0)
        moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    close(fd);
    return moved;
}

/* The open file behind a number; 0: none.  A program may close numbers that it has not opened, and use them itself: the hook compares before it uses
 * or closes a descriptor that it keeps.  Eventfds cannot be told apart.  fstat() is too new (glibc_floor.h). */
static inline uint64_t nvs_descriptor_file(int fd)
{
    struct stat found;
    return fd >= 0 && syscall(SYS_fstat, fd, &found) == 0 ? (uint64_t)found.st_dev << 32 ^ (uint64_t)found.st_ino : 0;
}

#endif
