/* Preloaded beside the hook: counts what its agent asks of the kernel, into the file that NVS_TEST_COUNTS names.
 *
 * Two words of 64 bits: calls of connect, and of ppoll.  The counts are shared memory, so that they can be read meanwhile.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static _Atomic uint64_t unseen[2];
static _Atomic uint64_t *counts = unseen;

__attribute__((constructor)) static void at_load(void)
{
    const char *path = getenv("NVS_TEST_COUNTS");
    int fd = path != NULL ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *shared = fd >= 0 ? mmap(NULL, sizeof unseen, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (shared != MAP_FAILED)
        counts = shared;
    if (fd >= 0)
        close(fd);
}

int connect(int fd, __CONST_SOCKADDR_ARG address, socklen_t length)
{
    atomic_fetch_add_explicit(&counts[0], 1, memory_order_relaxed);
    return (int)syscall(SYS_connect, fd, address.__sockaddr__, length);
}

int ppoll(struct pollfd *watched, nfds_t count, const struct timespec *patience, const sigset_t *mask)
{
    struct timespec left = patience != NULL ? *patience : (struct timespec){0, 0}; /* the system call writes into it */
    atomic_fetch_add_explicit(&counts[1], 1, memory_order_relaxed);
    return (int)syscall(SYS_ppoll, watched, count, patience != NULL ? &left : NULL, mask, _NSIG / 8);
}
