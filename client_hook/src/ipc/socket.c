/* See socket.h. */
#define _GNU_SOURCE /* struct ucred, accept4, MSG_CMSG_CLOEXEC */
#include "ipc/socket.h"

#include "base/process.h"
#include "base/system.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { BACKLOG = 64 };

bool nvs_ipc_make_secret(nvs_ipc_secret *out)
{
    if (syscall(SYS_getrandom, out->bytes, sizeof out->bytes, 0) == (long)sizeof out->bytes)
        return true;
    int fd = open("/dev/urandom", O_RDONLY | O_CLOEXEC); /* a sandbox may forbid the call */
    if (fd < 0)
        return false;
    bool whole = read(fd, out->bytes, sizeof out->bytes) == (ssize_t)sizeof out->bytes;
    close(fd);
    return whole;
}

bool nvs_ipc_same(const nvs_ipc_secret *a, const nvs_ipc_secret *b)
{
    unsigned difference = 0; /* constant time, whatever the guess */
    for (size_t i = 0; i < sizeof a->bytes; i++)
        difference |= (unsigned)(a->bytes[i] ^ b->bytes[i]);
    return difference == 0;
}

static void name_of(const nvs_ipc_secret *process, struct sockaddr_un *address, socklen_t *length)
{
    static const char prefix[] = "nvshare-ipc-";
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    char *at = address->sun_path + 1;
    memcpy(at, prefix, sizeof prefix - 1);
    at += sizeof prefix - 1;
    for (size_t i = 0; i < sizeof process->bytes; i++, at += 2)
        snprintf(at, 3, "%02x", process->bytes[i]);
    *length = (socklen_t)(at - (char *)address);
}

static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

static int new_socket(void)
{
    return nvs_descriptor_aside(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

int nvs_ipc_listen(const nvs_ipc_secret *process)
{
    struct sockaddr_un address;
    socklen_t length;
    name_of(process, &address, &length);
    int fd = new_socket();
    if (fd >= 0 && bind(fd, (const struct sockaddr *)&address, length) == 0 && listen(fd, BACKLOG) == 0)
        return fd;
    if (fd >= 0)
        close(fd);
    return -1;
}

int nvs_ipc_accept(int listener, bool *wait)
{
    *wait = false;
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            *wait = errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS;
            return -1;
        }
        if (same_user(fd))
            return nvs_descriptor_aside(fd);
        close(fd);
    }
}

static bool nap(uint64_t deadline_ns)
{
    static const long NAP_NS = 1000000;
    if (nvs_now_ns() >= deadline_ns)
        return false;
    nvs_nap(NAP_NS);
    return true;
}

int nvs_ipc_connect(const nvs_ipc_secret *process, uint64_t deadline_ns)
{
    struct sockaddr_un address;
    socklen_t length;
    name_of(process, &address, &length);
    int fd = new_socket();
    if (fd < 0)
        return -1;
    int failed;
    do /* the backlog is full, and a Unix socket cannot be polled for room */
        failed = connect(fd, (const struct sockaddr *)&address, length);
    while (failed != 0 && (errno == EAGAIN || errno == EINTR) && nap(deadline_ns));
    if (failed == 0 && same_user(fd))
        return fd;
    close(fd);
    return -1;
}

/* Until the socket is ready for one of `events`, or closed. */
static bool ready(int socket, short events, uint64_t deadline_ns)
{
    for (;;) {
        const uint64_t now = nvs_now_ns();
        struct pollfd one = {.fd = socket, .events = events};
        const uint64_t left_ms = now >= deadline_ns ? 0 : (deadline_ns - now) / 1000000 + 1;
        int found = poll(&one, 1, left_ms > INT32_MAX ? INT32_MAX : (int)left_ms);
        if (found > 0)
            return true;
        if (found == 0 || errno != EINTR)
            return false;
    }
}

typedef union control { /* room for the descriptors of one message */
    char room[CMSG_SPACE(NVS_IPC_CHUNKS * sizeof(int))];
    struct cmsghdr aligned;
} control;

bool nvs_ipc_send(int socket, const void *message, size_t bytes, const int *descriptors, uint32_t count, uint64_t deadline_ns)
{
    control attached = {0};
    struct iovec part = {(void *)(uintptr_t)message, bytes};
    struct msghdr whole = {.msg_iov = &part, .msg_iovlen = 1};
    if (count > NVS_IPC_CHUNKS)
        return false;
    if (count != 0) {
        whole.msg_control = &attached;
        whole.msg_controllen = CMSG_SPACE(count * sizeof *descriptors);
        struct cmsghdr *header = CMSG_FIRSTHDR(&whole);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(count * sizeof *descriptors);
        memcpy(CMSG_DATA(header), descriptors, count * sizeof *descriptors);
    }
    for (;;) {
        if (sendmsg(socket, &whole, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)bytes)
            return true;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN || !ready(socket, POLLOUT, deadline_ns))
            return false;
    }
}

void nvs_ipc_close_all(const int *descriptors, uint32_t count)
{
    for (uint32_t i = 0; i < count; i++)
        if (descriptors[i] >= 0)
            close(descriptors[i]);
}

/* Takes the descriptors out of a message, and closes those that do not fit. */
static bool unpack(struct msghdr *whole, int *descriptors, uint32_t most, uint32_t *count)
{
    bool fits = (whole->msg_flags & (MSG_CTRUNC | MSG_TRUNC)) == 0;
    for (struct cmsghdr *at = CMSG_FIRSTHDR(whole); at != NULL; at = CMSG_NXTHDR(whole, at)) {
        if (at->cmsg_level != SOL_SOCKET || at->cmsg_type != SCM_RIGHTS)
            continue;
        const size_t here = (at->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < here; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(at) + i * sizeof fd, sizeof fd);
            if (*count < most) {
                descriptors[(*count)++] = fd;
            } else {
                close(fd);
                fits = false;
            }
        }
    }
    return fits;
}

ssize_t nvs_ipc_receive(int socket, void *message, size_t room, int *descriptors, uint32_t most, uint32_t *count, uint64_t deadline_ns)
{
    *count = 0;
    for (;;) {
        control attached = {0};
        struct iovec part = {message, room};
        struct msghdr whole = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &attached, .msg_controllen = sizeof attached.room};
        ssize_t got = recvmsg(socket, &whole, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (got > 0 && unpack(&whole, descriptors, most, count))
            return got;
        if (got > 0) {
            nvs_ipc_close_all(descriptors, *count);
            *count = 0;
            return -1;
        }
        if (got == 0)
            return 0;
        if (errno == EINTR)
            continue;
        if (errno != EAGAIN || !ready(socket, POLLIN, deadline_ns))
            return errno == ECONNRESET ? 0 : -1;
    }
}
