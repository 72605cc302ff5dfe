/* Where descriptors of ours stand among the application's: above those that it gets, so that what it counts on stays as it was.
 *
 * An application that uses select() must go on getting small numbers.  One that was started without standard output must not
 * find our connection in its place and print into it.  And one that needs many must find them.
 */
#ifndef NVS_DESCRIPTOR_H
#define NVS_DESCRIPTOR_H

#include <fcntl.h>
#include <stdint.h>
#include <sys/resource.h>
#include <unistd.h>

/* The number from which on ours begin, and how many there are at most; 0: nobody knows.  Not simply the upper quarter: the kernel's
 * table is as long as the highest number, and every fork copies it.  Numbers from 1024 on are of no use to select(). */
static inline uint32_t nvs_descriptors_from(int *from)
{
    enum { HIGHEST = 16384, BEYOND_SELECT = 1024 };
    struct rlimit limit;
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0)
        return 0;
    const uint32_t most = limit.rlim_cur > HIGHEST ? HIGHEST : (uint32_t)limit.rlim_cur, first = most - most / 4;
    *from = (int)(first < BEYOND_SELECT ? first : BEYOND_SELECT);
    return most / 4;
}

/* The same file under such a number, else under any that is not for standard input, output or errors; -1 and closed if there is none.
 * It is close-on-exec. */
static inline int nvs_descriptor_aside(int fd)
{
    int from = 3;
    if (fd < 0)
        return fd;
    (void)nvs_descriptors_from(&from);
    int moved = fcntl(fd, F_DUPFD_CLOEXEC, from < 3 ? 3 : from);
    if (moved < 0 && fd > 2)
        return fd;
    if (moved < 0)
        moved = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    close(fd);
    return moved;
}

#endif
