/* Moves the hook's descriptors above those of the application.
 *
 * An application that uses select() needs small numbers.  An application that closed its standard output must not print into the hook's connection.
 * An application with many descriptors needs most numbers.
 */
#ifndef NVS_DESCRIPTOR_H
#define NVS_DESCRIPTOR_H

#include <fcntl.h>
#include <sys/resource.h>
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

#endif
