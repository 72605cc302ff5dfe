/* See server.h. */
#define _GNU_SOURCE /* pthread_setname_np */
#include "ipc/server.h"

#include "base/log.h"
#include "base/process.h"
#include "base/system.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_CLIENTS = 512, SHORT_OF_DESCRIPTORS_MS = 50 };
#define EXIT_TIMEOUT_NS 50000000u

typedef struct opened { /* an export that a client has open */
    struct opened *next;
    nvs_ipc_export_entry *export;
    nvs_ipc_secret key;
    uint64_t times; /* opens without a close */
} opened;

typedef struct client {
    int socket;
    opened *opens;
} client;

typedef struct server { /* only its thread uses it */
    const nvs_ipc_exports *exports;
    int listener;
    uint32_t count;
    client clients[MOST_CLIENTS];
    struct pollfd polled[MOST_CLIENTS + 1];
} server;

enum { NONE, STARTING, RUNNING };
NVS_FORK_STATE static _Atomic uint32_t phase; /* futex.  RUNNING is released after `own_name`, and acquired before it is read */
static nvs_ipc_secret own_name;
NVS_FORK_STATE static server *open_server; /* for a forked child, which closes its copies of the sockets */

/* At exit.  seq_cst: either the server sees `ending`, or the exiting thread sees `busy`. */
NVS_FORK_STATE static _Atomic uint32_t ending, busy;

static bool begin_driver(void)
{
    atomic_store_explicit(&busy, 1, memory_order_seq_cst); /* pairs with end_calls */
    return atomic_load_explicit(&ending, memory_order_seq_cst) == 0;
}

static void end_driver(void)
{
    atomic_store_explicit(&busy, 0, memory_order_seq_cst); /* pairs with end_calls */
    if (atomic_load_explicit(&ending, memory_order_seq_cst) != 0)
        nvs_futex_wake(&busy, INT32_MAX);
}

static void end_calls(void)
{
    const int saved = errno;
    const uint64_t until = nvs_now_ns() + EXIT_TIMEOUT_NS;
    atomic_store_explicit(&ending, 1, memory_order_seq_cst); /* pairs with begin_driver */
    while (atomic_load_explicit(&busy, memory_order_seq_cst) != 0 && nvs_now_ns() < until)
        nvs_futex_wait(&busy, 1, until);
    errno = saved;
}

/* --- requests --- */

static opened *find(const client *of, const nvs_ipc_secret *key)
{
    opened *at = of->opens;
    while (at != NULL && !nvs_ipc_same(&at->key, key))
        at = at->next;
    return at;
}

static void close_one(const nvs_ipc_exports *exports, client *of, opened *which)
{
    opened **link = &of->opens;
    while (*link != which)
        link = &(*link)->next;
    *link = which->next;
    if (begin_driver())
        exports->unref(which->export);
    end_driver();
    free(which);
}

/* The client's entry for an export; a request for its first chunk opens it once more. */
static opened *open_one(const nvs_ipc_exports *exports, client *of, const nvs_ipc_request *request)
{
    opened *at = find(of, &request->key);
    if (at == NULL && request->first == 0) {
        at = calloc(1, sizeof *at);
        nvs_ipc_export_entry *export = at != NULL ? exports->hold(&request->key) : NULL;
        if (export == NULL) {
            free(at);
            return NULL;
        }
        *at = (opened){.next = of->opens, .export = export, .key = request->key};
        of->opens = at;
    }
    if (at != NULL && request->first == 0)
        at->times++;
    return at;
}

static bool answer(const nvs_ipc_exports *exports, client *of, const nvs_ipc_request *request)
{
    nvs_ipc_answer reply = {.number = request->number, .result = NVS_IPC_STALE};
    int descriptors[NVS_IPC_CHUNKS];
    const opened *which = open_one(exports, of, request);
    if (which != NULL && begin_driver())
        exports->answer(which->export, request->first, &reply, descriptors);
    end_driver();
    /* A client has one request in flight, so the socket has room for the answer.  Deadline 0: never wait for a client. */
    const bool sent = nvs_ipc_send(of->socket, &reply, sizeof reply, descriptors, reply.here, 0);
    nvs_ipc_close_all(descriptors, reply.here);
    return sent;
}

/* False: the client has closed the connection, or broken the protocol. */
static bool serve(const nvs_ipc_exports *exports, client *of)
{
    nvs_ipc_request request;
    uint32_t ignored;
    ssize_t got = nvs_ipc_receive(of->socket, &request, sizeof request, NULL, 0, &ignored, 0);
    if (got != (ssize_t)sizeof request || request.version != NVS_IPC_VERSION)
        return false;
    if (request.what == NVS_IPC_OPEN)
        return answer(exports, of, &request);
    opened *which = find(of, &request.key);
    if (request.what != NVS_IPC_CLOSE)
        return false;
    if (which != NULL && --which->times == 0)
        close_one(exports, of, which);
    return true;
}

/* --- the thread --- */

static void close_client(server *of, uint32_t index)
{
    client *gone = &of->clients[index];
    const int socket = gone->socket;
    while (gone->opens != NULL)
        close_one(of->exports, gone, gone->opens);
    *gone = of->clients[of->count - 1];
    of->count--;
    close(socket); /* after it is out of the list: a child forked in between must not close a reused number */
}

/* False: no descriptors are free at present. */
static bool accept_client(server *of)
{
    bool wait;
    int socket = nvs_ipc_accept(of->listener, &wait);
    if (socket >= 0)
        of->clients[of->count++] = (client){.socket = socket};
    return !wait;
}

static void *run(void *argument)
{
    server *of = argument;
    bool receiving = true;
    (void)pthread_setname_np(pthread_self(), "nvshare-ipc");
    for (;;) {
        const uint32_t clients = of->count;
        for (uint32_t i = 0; i < clients; i++)
            of->polled[i] = (struct pollfd){.fd = of->clients[i].socket, .events = POLLIN};
        /* poll() ignores a negative descriptor. */
        of->polled[clients] = (struct pollfd){.fd = receiving && clients < MOST_CLIENTS ? of->listener : -1, .events = POLLIN};
        if (poll(of->polled, clients + 1, receiving ? -1 : SHORT_OF_DESCRIPTORS_MS) < 0)
            continue; /* the kernel has no memory; signals are blocked */
        receiving = true;
        for (uint32_t i = clients; i-- > 0;) /* backwards: the last client takes the place of one that is closed */
            if (of->polled[i].revents != 0 && !serve(of->exports, &of->clients[i]))
                close_client(of, i);
        if (of->polled[clients].revents != 0)
            receiving = accept_client(of);
    }
    return NULL;
}

static bool start(const nvs_ipc_exports *exports)
{
    server *made = calloc(1, sizeof *made);
    if (made == NULL || !nvs_ipc_make_secret(&own_name) || (made->listener = nvs_ipc_listen(&own_name)) < 0) {
        free(made);
        return false;
    }
    made->exports = exports;
    open_server = made;
    if (nvs_thread_start(NULL, run, made) == 0) {
        (void)atexit(end_calls); /* registered after the driver's own handlers, so it runs before them */
        return true;
    }
    open_server = NULL;
    close(made->listener);
    free(made);
    return false;
}

bool nvs_ipc_serve(const nvs_ipc_exports *exports, nvs_ipc_secret *process)
{
    const int saved = errno;
    const uint64_t until = nvs_now_ns() + NVS_IPC_TIMEOUT_NS;
    uint32_t seen = NONE;
    /* Acquire pairs with the releases below. */
    while (!atomic_compare_exchange_strong_explicit(&phase, &seen, STARTING, memory_order_acquire, memory_order_acquire) && seen != RUNNING &&
           nvs_now_ns() < until) {
        nvs_futex_wait(&phase, STARTING, until); /* another thread starts it */
        seen = NONE;
    }
    if (seen == NONE) {
        seen = start(exports) ? RUNNING : NONE;
        if (seen == NONE)
            NVS_LOG_ONCE(NVS_LOG_WARNING, "no socket or thread to share memory with other processes by (cuIpcGetMemHandle): %s", strerror(errno));
        atomic_store_explicit(&phase, seen, memory_order_release); /* pairs with the acquires above and in nvs_ipc_is_own */
        nvs_futex_wake(&phase, INT32_MAX);
    }
    if (seen == RUNNING)
        *process = own_name;
    errno = saved;
    return seen == RUNNING;
}

bool nvs_ipc_is_own(const nvs_ipc_secret *process)
{
    /* Acquire pairs with the release in nvs_ipc_serve. */
    return atomic_load_explicit(&phase, memory_order_acquire) == RUNNING && nvs_ipc_same(process, &own_name);
}

NVS_FORK_CODE void nvs_ipc_server_after_fork(void)
{
    if (open_server != NULL) { /* else the parent's clients would not notice its end */
        for (uint32_t i = 0; i < open_server->count; i++)
            close(open_server->clients[i].socket);
        close(open_server->listener);
    }
    open_server = NULL;
    atomic_store_explicit(&phase, NONE, memory_order_relaxed);
    atomic_store_explicit(&ending, 0, memory_order_relaxed);
    atomic_store_explicit(&busy, 0, memory_order_relaxed);
}
