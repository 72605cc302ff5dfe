/* See transport.h.  The declarations of libzmq 4 that are needed are made here, so that no header of it is. */
#include "transport.h"

#include "log.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* Names and numbers of libzmq's public interface, version 4. */
enum {
    ZMQ_PAIR = 0,
    ZMQ_DEALER = 5,
    ZMQ_FD = 14,
    ZMQ_EVENTS = 15,
    ZMQ_LINGER = 17,
    ZMQ_RECONNECT_IVL = 18,
    ZMQ_RECONNECT_IVL_MAX = 21,
    ZMQ_MAXMSGSIZE = 22,
    ZMQ_SNDHWM = 23,
    ZMQ_RCVHWM = 24,
    ZMQ_IMMEDIATE = 39,
    ZMQ_DONTWAIT = 1,
    ZMQ_IO_THREADS = 1,
    ZMQ_MAX_SOCKETS = 2,
    ZMQ_BLOCKY = 70,
};
enum { /* the monitor's events */
    EVENT_CONNECTED = 0x0001,
    EVENT_DISCONNECTED = 0x0200,
    EVENT_HANDSHAKE_FAILED = 0x0800 | 0x2000 | 0x4000,
    EVENT_HANDSHAKE_SUCCEEDED = 0x1000,
};
enum { QUEUE = 256, FIRST_RETRY_MS = 10, LONGEST_RETRY_MS = 500, LARGEST_MESSAGE = 4096 };

#define ZMQ_FUNCTIONS(F)                                                       \
    F(zmq_ctx_new, void *, (void))                                             \
    F(zmq_ctx_set, int, (void *, int, int))                                    \
    F(zmq_ctx_term, int, (void *))                                             \
    F(zmq_socket, void *, (void *, int))                                       \
    F(zmq_close, int, (void *))                                                \
    F(zmq_setsockopt, int, (void *, int, const void *, size_t))                \
    F(zmq_getsockopt, int, (void *, int, void *, size_t *))                    \
    F(zmq_connect, int, (void *, const char *))                                \
    F(zmq_send, int, (void *, const void *, size_t, int))                      \
    F(zmq_recv, int, (void *, void *, size_t, int))                            \
    F(zmq_socket_monitor, int, (void *, const char *, int))                    \
    F(zmq_errno, int, (void))                                                  \
    F(zmq_strerror, const char *, (int))                                       \
    F(zmq_version, void, (int *, int *, int *))

static struct {
#define DECLARE(name, result, parameters) result(*name) parameters;
    ZMQ_FUNCTIONS(DECLARE)
#undef DECLARE
} zmq;

static bool loaded;
static void *context, *dealer, *monitor;
static unsigned monitors_made; /* each needs a name of its own */
/* The connection's descriptor; read in the child of a fork, whose memory is a copy of ours at some moment. */
static atomic_int connection = -1;

nvs_status nvs_transport_load(const char *path)
{
    if (loaded)
        return NVS_OK;
    const char *name = path[0] != 0 ? path : "libzmq.so.5";
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        nvs_log(NVS_LOG_ERROR, "cannot load libzmq: %s; set NVSHARE_LIBZMQ to its path (nvshare-run does); not sharing",
                dlerror());
        return NVS_UNAVAILABLE;
    }
    /* The union keeps -Wpedantic content: POSIX lets dlsym's result be a function. */
#define RESOLVE(name_, result, parameters)                                                    \
    {                                                                                         \
        union {                                                                               \
            void *object;                                                                     \
            result(*function) parameters;                                                     \
        } symbol = {dlsym(library, #name_)};                                                  \
        if (symbol.object == NULL) {                                                          \
            nvs_log(NVS_LOG_ERROR, "%s has no " #name_ "; libzmq 4.2 or later is needed; not sharing", name); \
            return NVS_UNAVAILABLE;                                                           \
        }                                                                                     \
        zmq.name_ = symbol.function;                                                          \
    }
    ZMQ_FUNCTIONS(RESOLVE)
#undef RESOLVE
    int major = 0, minor = 0, patch = 0;
    zmq.zmq_version(&major, &minor, &patch);
    if (major != 4 || minor < 2) {
        nvs_log(NVS_LOG_ERROR, "%s is libzmq %d.%d.%d; 4.2 or later is needed; not sharing", name, major, minor, patch);
        return NVS_UNAVAILABLE;
    }
    loaded = true;
    return NVS_OK;
}

static void set(void *socket, int option, int value)
{
    if (option == ZMQ_MAXMSGSIZE) {
        int64_t wide = value;
        (void)zmq.zmq_setsockopt(socket, option, &wide, sizeof wide);
    } else {
        (void)zmq.zmq_setsockopt(socket, option, &value, sizeof value);
    }
}

static nvs_status open_monitor(void)
{
    char name[64];
    snprintf(name, sizeof name, "inproc://nvshare-monitor-%u", monitors_made++);
    if (zmq.zmq_socket_monitor(dealer, name,
                               EVENT_CONNECTED | EVENT_DISCONNECTED | EVENT_HANDSHAKE_FAILED | EVENT_HANDSHAKE_SUCCEEDED) != 0)
        return NVS_UNAVAILABLE;
    monitor = zmq.zmq_socket(context, ZMQ_PAIR);
    if (monitor == NULL)
        return NVS_UNAVAILABLE;
    set(monitor, ZMQ_LINGER, 0);
    return zmq.zmq_connect(monitor, name) == 0 ? NVS_OK : NVS_UNAVAILABLE;
}

nvs_status nvs_transport_connect(const char *socket_path)
{
    char endpoint[128];
    nvs_status status = NVS_UNAVAILABLE;
    nvs_transport_close();
    if (context == NULL && (context = zmq.zmq_ctx_new()) != NULL) {
        (void)zmq.zmq_ctx_set(context, ZMQ_IO_THREADS, 1);
        (void)zmq.zmq_ctx_set(context, ZMQ_MAX_SOCKETS, 16);
        (void)zmq.zmq_ctx_set(context, ZMQ_BLOCKY, 0);
    }
    if (context == NULL)
        goto out;
    dealer = zmq.zmq_socket(context, ZMQ_DEALER);
    if (dealer == NULL)
        goto out;
    set(dealer, ZMQ_LINGER, 0);
    set(dealer, ZMQ_IMMEDIATE, 1); /* nothing is queued for a peer that is not there */
    set(dealer, ZMQ_SNDHWM, QUEUE);
    set(dealer, ZMQ_RCVHWM, QUEUE);
    set(dealer, ZMQ_MAXMSGSIZE, LARGEST_MESSAGE);
    set(dealer, ZMQ_RECONNECT_IVL, FIRST_RETRY_MS);
    set(dealer, ZMQ_RECONNECT_IVL_MAX, LONGEST_RETRY_MS);
    if (open_monitor() != NVS_OK)
        goto out;
    snprintf(endpoint, sizeof endpoint, "ipc://%s", socket_path);
    if (zmq.zmq_connect(dealer, endpoint) != 0)
        goto out;
    status = NVS_OK;
out:
    if (status != NVS_OK) {
        NVS_LOG_ONCE(NVS_LOG_ERROR, "cannot make a socket for %s: %s", socket_path, zmq.zmq_strerror(zmq.zmq_errno()));
        nvs_transport_close();
    }
    return status;
}

void nvs_transport_close(void)
{
    atomic_store_explicit(&connection, -1, memory_order_relaxed); /* read after fork only, by the same thread's copy */
    if (dealer != NULL) {
        (void)zmq.zmq_socket_monitor(dealer, NULL, 0);
        (void)zmq.zmq_close(dealer);
    }
    if (monitor != NULL)
        (void)zmq.zmq_close(monitor);
    dealer = NULL;
    monitor = NULL;
}

bool nvs_transport_send(const uint8_t *frame, size_t size)
{
    return dealer != NULL && zmq.zmq_send(dealer, frame, size, ZMQ_DONTWAIT) == (int)size;
}

static nvs_transport_event next_change(void)
{
    uint8_t part[256];
    for (;;) {
        int size = monitor == NULL ? -1 : zmq.zmq_recv(monitor, part, sizeof part, ZMQ_DONTWAIT);
        if (size < 0)
            return NVS_TRANSPORT_NOTHING;
        if (size != 6)
            continue; /* the second part: an address */
        uint16_t event;
        int32_t value;
        memcpy(&event, part, sizeof event);
        memcpy(&value, part + 2, sizeof value);
        if (event == EVENT_CONNECTED)
            atomic_store_explicit(&connection, value, memory_order_relaxed); /* as in nvs_transport_close */
        else if (event == EVENT_HANDSHAKE_SUCCEEDED)
            return NVS_TRANSPORT_CONNECTED;
        else
            return NVS_TRANSPORT_LOST;
    }
}

nvs_transport_event nvs_transport_next(uint8_t *frame, size_t capacity, size_t *size)
{
    /* Frames first: what arrived before the connection was lost still counts. */
    int got = dealer == NULL ? -1 : zmq.zmq_recv(dealer, frame, capacity, ZMQ_DONTWAIT);
    if (got >= 0) {
        *size = (size_t)got;
        return NVS_TRANSPORT_FRAME;
    }
    return next_change();
}

unsigned nvs_transport_descriptors(int out[2])
{
    unsigned count = 0;
    void *sockets[2] = {dealer, monitor};
    for (unsigned i = 0; i < 2; i++) {
        size_t size = sizeof out[0];
        if (sockets[i] != NULL && zmq.zmq_getsockopt(sockets[i], ZMQ_FD, &out[count], &size) == 0)
            count++;
    }
    return count;
}

void nvs_transport_finish(int linger_ms)
{
    if (dealer != NULL)
        set(dealer, ZMQ_LINGER, linger_ms);
    nvs_transport_close();
    if (context != NULL)
        (void)zmq.zmq_ctx_term(context); /* waits for the linger, not longer */
    context = NULL;
}

void nvs_transport_abandon(void)
{
    int fd = atomic_load_explicit(&connection, memory_order_relaxed); /* one thread is left */
    if (fd >= 0)
        close(fd);
    atomic_store_explicit(&connection, -1, memory_order_relaxed);
    context = dealer = monitor = NULL;
}
