/* See connection.h. */
#include "ipc/connection.h"

#include "base/process.h"
#include "base/system.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

struct nvs_ipc_connection {
    struct nvs_ipc_connection *next;
    nvs_ipc_secret process;
    int socket;            /* -1: not connected */
    uint32_t users;        /* under the lock */
    uint32_t number;       /* of the last request */
    _Atomic uint32_t busy; /* futex: 1 while a thread uses the socket.  Acquire and release: as a lock */
    int cancel;            /* that thread's state, for nvs_cancel_allow */
};

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "connections" in the lock order of base/base.h */
NVS_FORK_STATE static nvs_ipc_connection *connections;

nvs_ipc_connection *nvs_ipc_connection_to(const nvs_ipc_secret *process)
{
    nvs_ipc_connection *fresh = calloc(1, sizeof *fresh);
    pthread_mutex_lock(&lock);
    nvs_ipc_connection *at = connections;
    while (at != NULL && !nvs_ipc_same(&at->process, process))
        at = at->next;
    if (at == NULL && fresh != NULL) {
        *fresh = (nvs_ipc_connection){.next = connections, .process = *process, .socket = -1};
        at = connections = fresh;
        fresh = NULL;
    }
    if (at != NULL)
        at->users++;
    pthread_mutex_unlock(&lock);
    free(fresh);
    return at;
}

void nvs_ipc_connection_unref(nvs_ipc_connection *of)
{
    pthread_mutex_lock(&lock);
    const bool last = --of->users == 0;
    nvs_ipc_connection **link = &connections;
    while (last && *link != of)
        link = &(*link)->next;
    if (last)
        *link = of->next;
    pthread_mutex_unlock(&lock);
    if (!last)
        return;
    if (of->socket >= 0)
        close(of->socket);
    free(of);
}

static bool lock_connection(nvs_ipc_connection *of, uint64_t deadline_ns)
{
    while (atomic_exchange_explicit(&of->busy, 1, memory_order_acquire) != 0) { /* pairs with unlock_connection */
        if (nvs_now_ns() >= deadline_ns)
            return false;
        nvs_futex_wait(&of->busy, 1, deadline_ns);
    }
    of->cancel = nvs_cancel_defer();
    return true;
}

static void unlock_connection(nvs_ipc_connection *of)
{
    const int cancel = of->cancel;
    atomic_store_explicit(&of->busy, 0, memory_order_release); /* pairs with lock_connection */
    nvs_futex_wake(&of->busy, 1);
    nvs_cancel_allow(cancel);
}

static void disconnect(nvs_ipc_connection *of)
{
    const int socket = of->socket;
    of->socket = -1; /* before close(): a child forked in between must not close a reused number */
    if (socket >= 0)
        close(socket);
}

/* Connects if necessary.  False: the exporter has ended, or does not receive in time. */
static bool send_request(nvs_ipc_connection *of, nvs_ipc_request *message, uint64_t deadline_ns)
{
    if (of->socket < 0)
        of->socket = nvs_ipc_connect(&of->process, deadline_ns);
    message->version = NVS_IPC_VERSION;
    message->number = ++of->number;
    if (of->socket >= 0 && nvs_ipc_send(of->socket, message, sizeof *message, NULL, 0, deadline_ns))
        return true;
    disconnect(of);
    return false;
}

static bool is_valid(const nvs_ipc_answer *of, uint32_t count)
{
    const uint64_t most = UINT64_C(1) << 46;
    uint64_t sum = 0;
    if (of->result != CUDA_SUCCESS)
        return count == 0;
    if (of->here == 0 || of->here > NVS_IPC_CHUNKS || count != of->here || of->total_bytes > most)
        return false;
    for (uint32_t i = 0; i < of->here; i++) {
        if (of->bytes[i] == 0 || of->bytes[i] > of->total_bytes - sum)
            return false;
        sum += of->bytes[i];
    }
    return of->length != 0 && of->offset <= of->total_bytes && of->length <= of->total_bytes - of->offset;
}

CUresult nvs_ipc_fetch(nvs_ipc_connection *of, const nvs_ipc_secret *key, uint32_t first, nvs_ipc_answer *out, int *descriptors, uint64_t deadline_ns)
{
    nvs_ipc_request request = {.what = NVS_IPC_OPEN, .first = first, .key = *key};
    CUresult result = NVS_IPC_STALE;
    uint32_t count = 0;
    if (!lock_connection(of, deadline_ns))
        return CUDA_ERROR_MAP_FAILED;
    bool asked = send_request(of, &request, deadline_ns);
    while (asked) {
        const ssize_t got = nvs_ipc_receive(of->socket, out, sizeof *out, descriptors, NVS_IPC_CHUNKS, &count, deadline_ns);
        if (got == (ssize_t)sizeof *out && out->number == request.number && is_valid(out, count)) {
            result = (CUresult)out->result;
            break;
        }
        nvs_ipc_close_all(descriptors, count);
        count = 0;
        if (got == (ssize_t)sizeof *out && out->number != request.number)
            continue; /* the answer to a request that was given up */
        result = got == 0 ? NVS_IPC_STALE : CUDA_ERROR_MAP_FAILED;
        if (got != -1)
            disconnect(of); /* the exporter has ended, or broken the protocol */
        break;
    }
    unlock_connection(of);
    return result;
}

void nvs_ipc_notify_closed(nvs_ipc_connection *of, const nvs_ipc_secret *key)
{
    nvs_ipc_request request = {.what = NVS_IPC_CLOSE, .key = *key};
    const uint64_t deadline = nvs_now_ns() + NVS_IPC_TIMEOUT_NS / 10;
    if (!lock_connection(of, deadline))
        return; /* the exporter notices when the connection ends */
    if (of->socket >= 0)
        (void)send_request(of, &request, deadline);
    unlock_connection(of);
}

NVS_FORK_CODE void nvs_ipc_connections_after_fork(void)
{
    for (const nvs_ipc_connection *at = connections; at != NULL; at = at->next)
        if (at->socket >= 0)
            close(at->socket); /* else the exporter would not notice the parent's end */
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    connections = NULL;
}
