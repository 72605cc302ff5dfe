/* Moves the hook's descriptors above those of the application.
 *
 * An application that uses select() needs small numbers.  An application that closed its standard output must not print into the hook's connection.
 * An application with many descriptors needs most numbers.
 */
#ifndef NVS_DESCRIPTOR_H
#define NVS_DESCRIPTOR_H

#include <fcntl.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Duplicates `fd` above the application's numbers, else above standard error, as close-on-exec, and closes it; -1 if that fails.
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
