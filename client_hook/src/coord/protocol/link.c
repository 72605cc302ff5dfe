/* The transport is ZMTP 3.1 with the NULL mechanism (https://rfc.zeromq.org/spec/37/), the client's side of it (a DEALER), over a non-blocking Unix
 * socket.  The coordinator's side is coordinator/protocol/framing.py.
 *
 * Why not libzmq: it brings two threads and a C++ runtime into somebody's process, and each message through it wakes one more
 * sleeping thread, which is most of what a hand-over costs (docs/decisions/zmtp-framing.md).
 *
 * While nobody listens the link tries again after 10 ms, doubled up to 50 ms while a coordinator may be restarting and up to 500 ms
 * later, and sleeps meanwhile.  After the loss of a connection it connects again after the same delay.  Nothing that was queued on the old connection
 * reaches the new peer.
 */
#define _GNU_SOURCE /* SOCK_CLOEXEC, MSG_NOSIGNAL, struct ucred, syscall, program_invocation_short_name */
#include "coord/protocol/link.h"

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "memory/backend.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* --- the transport --- */

typedef enum nvs_transport_event {
    NVS_TRANSPORT_NOTHING = 0,
    NVS_TRANSPORT_LOST,  /* or not established: close, pause, connect again */
    NVS_TRANSPORT_FRAME, /* a frame of *size bytes; larger than the buffer when it was cut */
} nvs_transport_event;

enum { FLAG_MORE = 1, FLAG_LONG = 2, FLAG_COMMAND = 4 };
enum {
    GREETING = 64,
    LARGEST = 4096,          /* of a frame of the peer's; the protocol's own bound is smaller */
    INCOMING = 16384,
    OUTGOING = 32768,        /* what a peer that does not read may leave with us */
    HEADER = 9,
};

static const uint8_t greeting[GREETING] = {0xff, 0, 0, 0, 0, 0, 0, 0, 0, 0x7f, 3, 1, 'N', 'U', 'L', 'L'};
static const uint8_t ready[] = "\x04\x29"
                               "\x05READY"
                               "\x0bSocket-Type\x00\x00\x00\x06"
                               "DEALER"
                               "\x08Identity\x00\x00\x00";
/* The literal's own terminator is the last byte of Identity's length. */

/* Read in the child of a fork, whose memory is a copy of ours at some moment. */
NVS_FORK_STATE static atomic_int connection = -1;
NVS_FORK_STATE static uint64_t connected_file; /* behind it */
static int connect_error; /* errno of the last attempt; 0: a peer listens */
NVS_FORK_STATE static bool greeting_read, peer_ready, lost; /* peer_ready: both ends have shaken hands */
static uint8_t incoming[INCOMING], outgoing[OUTGOING];
static size_t in_begin, in_end, out_begin, out_end;

static int descriptor(void)
{
    return atomic_load_explicit(&connection, memory_order_relaxed); /* this thread wrote it */
}

/* Hands out what is queued, as far as the kernel takes it. */
static void push(void)
{
    while (out_begin < out_end && !lost) {
        ssize_t sent = send(descriptor(), outgoing + out_begin, out_end - out_begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent > 0)
            out_begin += (size_t)sent;
        else if (sent < 0 && errno == EINTR)
            continue;
        else if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return;
        else
            lost = true;
    }
    if (out_begin == out_end)
        out_begin = out_end = 0;
}

static bool queue(const void *bytes, size_t size)
{
    if (size > sizeof outgoing - out_end && out_begin > 0) {
        memmove(outgoing, outgoing + out_begin, out_end - out_begin);
        out_end -= out_begin;
        out_begin = 0;
    }
    if (size > sizeof outgoing - out_end)
        return false;
    memcpy(outgoing + out_end, bytes, size);
    out_end += size;
    return true;
}

/* A directory that nobody but its owner changes.  stat() is too new (base/glibc_floor.h). */
static bool owned(const char *path, uid_t *owner)
{
    struct stat found;
    if (syscall(SYS_newfstatat, AT_FDCWD, path, &found, 0) != 0 || (found.st_mode & (S_IWGRP | S_IWOTH)) != 0)
        return false;
    *owner = found.st_uid;
    return true;
}

/* The kernel names the user that listens: root, or this program's own.  Any other user must own the socket's directory, and root must have made it:
 * under /tmp everybody can make one.  The directory may be root's then, too: in a user namespace the kernel shows the outer root as nobody. */
static bool may_coordinate(uid_t user, const char *socket_path)
{
    char path[sizeof((struct sockaddr_un *)NULL)->sun_path + 8];
    const char *slash = strrchr(socket_path, '/');
    uid_t owner, maker;
    if (user == 0 || user == geteuid())
        return true;
    if (slash == NULL)
        return false;
    const int length = (int)(slash - socket_path);
    (void)snprintf(path, sizeof path, "%.*s/.", length, socket_path);
    if (!owned(path, &owner) || (owner != user && owner != 0))
        return false;
    (void)snprintf(path, sizeof path, "%.*s/..", length, socket_path);
    return owned(path, &maker) && maker == 0;
}

static bool trusted(int fd, const char *socket_path, int32_t coordinator_user)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
        return false;
    if ((coordinator_user >= 0 && peer.uid == (uid_t)coordinator_user) || may_coordinate(peer.uid, socket_path))
        return true;
    NVS_LOG_ONCE(NVS_LOG_ERROR, "user %u listens at %s; this program takes root, its own user, or the owner of a directory that root has made for its "
                 "coordinator: it goes on as without one (set NVSHARE_COORDINATOR_USER=%u if that user is meant to coordinate it)", (unsigned)peer.uid, socket_path,
                 (unsigned)peer.uid);
    return false;
}

/* False: not connected, or the program has closed the descriptor. */
static bool transport_own(void)
{
    return descriptor() >= 0 && nvs_descriptor_file(descriptor()) == connected_file;
}

static void transport_close(void)
{
    if (transport_own())
        close(descriptor());
    atomic_store_explicit(&connection, -1, memory_order_relaxed); /* as in transport_connect */
    lost = false;
}

/* UNAVAILABLE: the path cannot be one, or the process has no descriptor left; the reason is logged.  That nobody listens
 * is no failure: transport_next() says LOST.  A listener of another user than root, this program's own, the owner of a
 * directory that root has made, or `coordinator_user` (-1: none) is not talked to: UNAVAILABLE. */
static nvs_status transport_connect(const char *socket_path, int32_t coordinator_user)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    size_t length = strlen(socket_path);
    transport_close();
    if (length == 0 || length >= sizeof address.sun_path) {
        NVS_LOG_ONCE(NVS_LOG_ERROR, "NVSHARE_SOCKET is no usable path: %s; at most %zu bytes are possible", socket_path,
                     sizeof address.sun_path - 1);
        return NVS_UNAVAILABLE;
    }
    memcpy(address.sun_path, socket_path, length + 1);
    int fd = nvs_descriptor_aside(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (fd < 0) {
        NVS_LOG_ONCE(NVS_LOG_ERROR, "cannot make a socket: %s", strerror(errno));
        return NVS_UNAVAILABLE;
    }
    connected_file = nvs_descriptor_file(fd);
    atomic_store_explicit(&connection, fd, memory_order_relaxed); /* read after fork only, by the same thread's copy */
    greeting_read = peer_ready = false;
    in_begin = in_end = out_begin = out_end = 0;
    /* On a Unix socket there is no "in progress": it is connected now, or nobody listens (yet). */
    lost = connect(fd, (const struct sockaddr *)&address, sizeof address) != 0;
    connect_error = lost ? errno : 0;
    if (!lost && !trusted(fd, socket_path, coordinator_user)) {
        transport_close();
        return NVS_UNAVAILABLE;
    }
    if (!lost) {
        (void)queue(greeting, sizeof greeting);
        (void)queue(ready, sizeof ready);
        push();
    }
    return NVS_OK;
}

int nvs_transport_connect_error(void)
{
    return connect_error;
}

/* Never blocks.  False: it cannot be sent now (no peer, or its queue is full). */
static bool transport_send(const uint8_t *frame, size_t size)
{
    uint8_t header[HEADER] = {0, (uint8_t)size};
    size_t header_size = 2;
    if (descriptor() < 0 || lost || !peer_ready || size > LARGEST)
        return false;
    if (size > 255) {
        header[0] = FLAG_LONG;
        for (unsigned i = 0; i < 8; i++)
            header[1 + i] = (uint8_t)((uint64_t)size >> (56 - 8 * i));
        header_size = HEADER;
    }
    size_t before = out_end - out_begin;
    if (before + header_size + size > sizeof outgoing || !queue(header, header_size) || !queue(frame, size))
        return false;
    push();
    return !lost;
}

/* Moves what has come into the buffer.  False: nothing more for now, or the end. */
static bool pull(void)
{
    if (in_begin > 0) {
        memmove(incoming, incoming + in_begin, in_end - in_begin);
        in_end -= in_begin;
        in_begin = 0;
    }
    ssize_t got = recv(descriptor(), incoming + in_end, sizeof incoming - in_end, MSG_DONTWAIT);
    if (got > 0) {
        in_end += (size_t)got;
        return true;
    }
    if (got == 0 || (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR))
        lost = true;
    return false;
}

static bool read_greeting(void)
{
    const uint8_t *theirs = incoming + in_begin;
    if (in_end - in_begin < GREETING)
        return false;
    if (theirs[0] != 0xff || theirs[9] != 0x7f || theirs[10] < 3 || memcmp(theirs + 12, "NULL", 5) != 0) {
        lost = true;
        return false;
    }
    in_begin += GREETING;
    greeting_read = true;
    return true;
}

static void handle_command(const uint8_t *command, size_t size)
{
    if (size >= 6 && memcmp(command, "\x05READY", 6) == 0) {
        peer_ready = true;
    } else if (size >= 7 && memcmp(command, "\x04PING", 5) == 0) {
        size_t context = size - 7 < 16 ? size - 7 : 16; /* after the time to live, to be sent back */
        uint8_t pong[2 + 5 + 16] = {FLAG_COMMAND, (uint8_t)(5 + context), 4, 'P', 'O', 'N', 'G'};
        memcpy(pong + 7, command + 7, context);
        if (queue(pong, 7 + context))
            push();
    }
}

/* One frame out of the buffer.  NOTHING when none is complete. */
static nvs_transport_event take(uint8_t *frame, size_t capacity, size_t *size)
{
    for (;;) {
        const uint8_t *at = incoming + in_begin;
        size_t have = in_end - in_begin, header = 2;
        uint64_t length;
        if (have < 2)
            return NVS_TRANSPORT_NOTHING;
        length = at[1];
        if (at[0] & FLAG_LONG) {
            if (have < HEADER)
                return NVS_TRANSPORT_NOTHING;
            length = 0;
            for (unsigned i = 1; i < HEADER; i++)
                length = length << 8 | at[i];
            header = HEADER;
        }
        bool command = (at[0] & FLAG_COMMAND) != 0;
        if (length > LARGEST || (at[0] & FLAG_MORE) || (!command && !peer_ready)) {
            lost = true; /* not what a coordinator sends */
            return NVS_TRANSPORT_LOST;
        }
        if (have < header + length)
            return NVS_TRANSPORT_NOTHING;
        in_begin += header + (size_t)length;
        if (!command) {
            *size = (size_t)length;
            memcpy(frame, at + header, *size < capacity ? *size : capacity);
            return NVS_TRANSPORT_FRAME;
        }
        handle_command(at + header, (size_t)length);
    }
}

/* Never blocks. */
static nvs_transport_event transport_next(uint8_t *frame, size_t capacity, size_t *size)
{
    push();
    /* Frames first: what arrived before the connection was lost still counts. */
    do {
        if (!greeting_read && !read_greeting())
            continue;
        nvs_transport_event event = take(frame, capacity, size);
        if (event != NVS_TRANSPORT_NOTHING)
            return event;
    } while (!lost && pull());
    return lost ? NVS_TRANSPORT_LOST : NVS_TRANSPORT_NOTHING;
}

void nvs_transport_finish(int linger_ms)
{
    if (descriptor() >= 0) {
        struct pollfd writable = {descriptor(), POLLOUT, 0};
        push();
        if (out_begin < out_end && !lost && poll(&writable, 1, linger_ms) == 1)
            push();
    }
    transport_close();
}

NVS_FORK_CODE void nvs_transport_abandon(void)
{
    transport_close(); /* the child's copy only: the parent's connection lives on */
}

/* --- the link --- */

#define FIRST_RETRY_NS 10000000u
#define RESTART_RETRY_NS 50000000u   /* the longest delay while a restart may be under way: an attempt takes microseconds */
#define RESTART_NS 10000000000u
#define LONGEST_RETRY_NS 500000000u
#define STABLE_NS 1000000000u        /* after a connection that lasted so long the retries begin anew */
#define REFUSED_RETRY_NS 5000000000u /* after the coordinator refused us for good */
enum { FRAMES_A_ROUND = 64 };

static bool up, broken, refused, has_more; /* up: hello is sent */
static uint64_t up_since_ns, lost_ns, retry_at_ns, retry_delay_ns;

void nvs_link_start(void)
{
    up = broken = refused = has_more = false;
    retry_at_ns = 0;
    retry_delay_ns = FIRST_RETRY_NS;
    lost_ns = nvs_now_ns();
}

bool nvs_link_up(void)
{
    return up;
}

void nvs_link_send(const uint8_t *frame, size_t size)
{
    if (!up || broken || size == 0)
        return;
    if (!transport_send(frame, size))
        broken = true; /* the peer reads nothing; all state is sent again on the next connection */
}

void nvs_link_fail(void)
{
    broken = true;
}

void nvs_link_refused(void)
{
    broken = refused = true;
}

uint64_t nvs_link_due(void)
{
    return descriptor() >= 0 ? UINT64_MAX : retry_at_ns;
}

bool nvs_link_has_more(void)
{
    return has_more || broken;
}

int nvs_link_descriptor(short *events)
{
    *events = out_begin < out_end ? POLLIN | POLLOUT : POLLIN;
    return descriptor();
}

_Static_assert((int)NVS_MODE_MANAGED == NVS_MEMORY_MODE_MANAGED && (int)NVS_MODE_SWAP == NVS_MEMORY_MODE_SWAP, "base/config.h");
_Static_assert(sizeof((nvs_hello){0}.profile) == sizeof nvs_config.profile, "base/config.h");

static void say_hello(void)
{
    nvs_hello hello = {
        .protocol = NVS_PROTOCOL_VERSION,
        .memory_mode = nvs_config.memory_mode,
        .memory_auto = nvs_config.memory_auto,
        .memory_limit_bytes = nvs_config.memory_limit,
        .spatial = nvs_config.spatial,
    };
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    const char *program = program_invocation_short_name;
    size_t length = strnlen(program, sizeof hello.program - 1);
    memcpy(hello.name, nvs_config.name, sizeof hello.name);
    char peer[46]; /* INET6_ADDRSTRLEN */
    if (nvs_config_remote_peer(peer, sizeof peer))
        snprintf(hello.name, sizeof hello.name, "%.*s %s", (int)(sizeof hello.name - strlen(peer) - 2), nvs_config.name, peer);
    memcpy(hello.profile, nvs_config.profile, sizeof hello.profile);
    memcpy(hello.placement, nvs_config.placement, sizeof hello.placement);
    memcpy(hello.program, program, length);
    if (!nvs_wire_text_valid((const uint8_t *)hello.program, length))
        memset(hello.program, 0, sizeof hello.program); /* it is only shown */
    nvs_link_send(frame, nvs_encode_hello(&hello, frame, sizeof frame));
}

static void drop(const nvs_link_handlers *handlers)
{
    uint64_t now = nvs_now_ns();
    bool was_up = up;
    if (up && now - up_since_ns > STABLE_NS)
        retry_delay_ns = FIRST_RETRY_NS;
    if (was_up)
        lost_ns = now;
    const uint64_t longest = now - lost_ns < RESTART_NS ? RESTART_RETRY_NS : LONGEST_RETRY_NS;
    retry_at_ns = now + (refused ? REFUSED_RETRY_NS : retry_delay_ns);
    retry_delay_ns = retry_delay_ns * 2 < longest ? retry_delay_ns * 2 : longest;
    transport_close();
    up = broken = refused = has_more = false; /* nothing to receive before the next connection */
    if (was_up) {
        nvs_log(NVS_LOG_INFO, "connection to %s lost", nvs_config.socket);
        handlers->lost();
    }
}

void nvs_link_serve(const nvs_link_handlers *handlers)
{
    static uint8_t frame[NVS_MAX_FRAME_BYTES + 1];
    size_t size = 0;
    if (descriptor() < 0 && nvs_now_ns() >= retry_at_ns &&
        transport_connect(nvs_config.socket, nvs_config.coordinator_user) != NVS_OK)
        retry_at_ns = nvs_now_ns() + REFUSED_RETRY_NS;
    if (descriptor() >= 0 && !transport_own())
        broken = true;
    for (unsigned i = 0; i < FRAMES_A_ROUND && descriptor() >= 0 && !broken; i++) {
        nvs_transport_event event = transport_next(frame, sizeof frame, &size);
        if (peer_ready && !up && nvs_memory_mode_chosen()) { /* hello names the mode */
            up = true;
            up_since_ns = nvs_now_ns();
            say_hello();
            handlers->connected();
        }
        has_more = event != NVS_TRANSPORT_NOTHING; /* there may be more than one round takes */
        if (!has_more)
            return;
        if (event == NVS_TRANSPORT_FRAME)
            handlers->frame(frame, size);
        else
            broken = true;
    }
    if (broken)
        drop(handlers);
}
