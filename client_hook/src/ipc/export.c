/* The exports of this process: their chunks, their keys, and the number of processes that have each open; and the thread that serves them to importers.
 *
 * An export lives, with its chunks pinned, until the program has freed the memory and no other process has it open.
 *
 * The thread starts with the first export and sleeps between requests.  Each importing process has one connection; the end of a connection closes the
 * exports that were open on it, also when the importer was killed.
 *
 * The thread calls the driver to make descriptors, and to free memory that it was the last holder of, until the process begins to exit.
 */
#define _GNU_SOURCE /* pthread_setname_np */
#include "base/base.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "ipc/ipc.h"
#include "ipc/socket.h"
#include "swap/swap.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct nvs_ipc_export_entry nvs_ipc_export_entry;

static const char MAGIC[8] = "nvshIPC";

struct nvs_ipc_export_entry {
    struct nvs_ipc_export_entry *next;
    nvs_ipc_secret key;
    CUdeviceptr address;
    uint64_t length;
    uint32_t gpu;
    uint32_t holders; /* processes that have it open, and a lookup in progress */
    bool withdrawn;   /* the program has freed it: its handle is invalid */
    nvs_share share;
};

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "exports" in the lock order of base/base.h */
NVS_FORK_STATE static nvs_ipc_export_entry *exports;
NVS_FORK_STATE static _Atomic uint32_t export_count; /* relaxed: the thread that frees exported memory is ordered after its export */

static nvs_ipc_export_entry *find_address(uint32_t gpu, CUdeviceptr address)
{
    nvs_ipc_export_entry *at = exports;
    while (at != NULL && (at->gpu != gpu || at->address != address || at->withdrawn))
        at = at->next;
    return at;
}

/* Locked.  Unlists a withdrawn export without holders; true: the caller ends it. */
static bool unlink_if_unused(nvs_ipc_export_entry *entry)
{
    if (!entry->withdrawn || entry->holders != 0)
        return false;
    nvs_ipc_export_entry **link = &exports;
    while (*link != entry)
        link = &(*link)->next;
    *link = entry->next;
    atomic_fetch_sub_explicit(&export_count, 1, memory_order_relaxed); /* see its declaration */
    return true;
}

static void end(nvs_ipc_export_entry *entry)
{
    const uint32_t gpu = entry->gpu;
    nvs_share_end(&entry->share);
    nvs_coordinator.memory_changed(gpu);
    free(entry);
}

static void describe(const nvs_ipc_export_entry *entry, const nvs_ipc_secret *process, CUipcMemHandle *out)
{
    nvs_ipc_handle handle = {.version = NVS_IPC_VERSION, .process_id = getpid(), .process = *process, .key = entry->key, .length = entry->length};
    memcpy(handle.magic, MAGIC, sizeof MAGIC);
    memcpy(out, &handle, sizeof *out);
}

bool nvs_ipc_is_ours(const CUipcMemHandle *handle)
{
    return memcmp(handle->reserved, MAGIC, sizeof MAGIC) == 0;
}

/* The handle of an existing export.  False: there is none. */
static bool find_handle(const nvs_allocation *allocation, const nvs_ipc_secret *process, CUipcMemHandle *out)
{
    pthread_mutex_lock(&lock);
    const nvs_ipc_export_entry *entry = find_address(allocation->gpu, allocation->key);
    if (entry != NULL)
        describe(entry, process, out);
    pthread_mutex_unlock(&lock);
    return entry != NULL;
}

/* False: another thread has exported the allocation meanwhile, and its handle stays. */
static bool insert(nvs_ipc_export_entry *entry)
{
    pthread_mutex_lock(&lock);
    const bool first = find_address(entry->gpu, entry->address) == NULL;
    if (first) {
        entry->next = exports;
        exports = entry;
        atomic_fetch_add_explicit(&export_count, 1, memory_order_relaxed); /* see its declaration */
    }
    pthread_mutex_unlock(&lock);
    return first;
}

static CUresult pin(const nvs_allocation *allocation, nvs_share *out)
{
    const uint32_t gpu = allocation->gpu;
    nvs_slot *const slot = nvs_gate_enter(gpu); /* in the open gate all memory is on the GPU */
    const CUresult result = nvs_share_begin(gpu, allocation->backend.kept, allocation->key, allocation->length, out);
    nvs_gate_leave(slot, gpu);
    if (result == CUDA_SUCCESS)
        nvs_coordinator.memory_changed(gpu);
    return result;
}

/* --- what the thread serves --- */

static nvs_ipc_export_entry *hold(const nvs_ipc_secret *key)
{
    pthread_mutex_lock(&lock);
    nvs_ipc_export_entry *entry = exports;
    while (entry != NULL && !nvs_ipc_same(&entry->key, key))
        entry = entry->next;
    if (entry != NULL && entry->withdrawn)
        entry = NULL;
    if (entry != NULL)
        entry->holders++;
    pthread_mutex_unlock(&lock);
    return entry;
}

static void unref(nvs_ipc_export_entry *held)
{
    pthread_mutex_lock(&lock);
    held->holders--;
    const bool unused = unlink_if_unused(held);
    pthread_mutex_unlock(&lock);
    if (unused)
        end(held);
}

static void fill(const nvs_ipc_export_entry *held, uint32_t first, nvs_ipc_answer *out, int *descriptors)
{
    const nvs_share *share = &held->share;
    out->chunks = share->count;
    out->total_bytes = share->bytes;
    out->offset = share->offset;
    out->length = held->length;
    out->here = 0;
    out->result = first < share->count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    while (out->result == CUDA_SUCCESS && out->here < NVS_IPC_CHUNKS && first + out->here < share->count) {
        const uint32_t chunk = share->first + first + out->here;
        const int descriptor = nvs_chunk_descriptor(share->segment, chunk);
        if (descriptor < 0) {
            out->result = CUDA_ERROR_MAP_FAILED;
            break;
        }
        out->bytes[out->here] = nvs_segment_chunk_bytes(share->segment, chunk);
        descriptors[out->here++] = descriptor;
    }
}

/* --- the thread that serves --- */

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
    int listener;
    uint32_t count;
    client clients[MOST_CLIENTS];
    struct pollfd polled[MOST_CLIENTS + 1];
} server;

NVS_FORK_STATE static pthread_mutex_t server_lock = PTHREAD_MUTEX_INITIALIZER; /* "their server's start" in base/base.h: of the next two */
static nvs_ipc_secret own_name;
NVS_FORK_STATE static server *open_server; /* NULL: not started.  A forked child closes its copies of the sockets */

NVS_FORK_STATE static pthread_mutex_t driver_lock = PTHREAD_MUTEX_INITIALIZER; /* the last one in base/base.h */
NVS_FORK_STATE static atomic_bool ending; /* relaxed: an exiting thread waits for the calls that have missed it */

static bool begin_driver(void)
{
    pthread_mutex_lock(&driver_lock);
    return !atomic_load_explicit(&ending, memory_order_relaxed); /* see its declaration */
}

static void end_driver(void)
{
    pthread_mutex_unlock(&driver_lock);
}

static void end_calls(void)
{
    const struct timespec until = nvs_wait_until(EXIT_TIMEOUT_NS);
    atomic_store_explicit(&ending, true, memory_order_relaxed); /* see its declaration */
    if (pthread_mutex_timedlock(&driver_lock, &until) == 0)
        pthread_mutex_unlock(&driver_lock);
}

/* --- requests --- */

static opened *find(const client *of, const nvs_ipc_secret *key)
{
    opened *at = of->opens;
    while (at != NULL && !nvs_ipc_same(&at->key, key))
        at = at->next;
    return at;
}

static void close_one(client *of, opened *which)
{
    opened **link = &of->opens;
    while (*link != which)
        link = &(*link)->next;
    *link = which->next;
    if (begin_driver())
        unref(which->export);
    end_driver();
    free(which);
}

/* The client's entry for an export; a request for its first chunk opens it once more. */
static opened *open_one(client *of, const nvs_ipc_request *request)
{
    opened *at = find(of, &request->key);
    if (at == NULL && request->first == 0) {
        at = calloc(1, sizeof *at);
        nvs_ipc_export_entry *export = at != NULL ? hold(&request->key) : NULL;
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

static bool answer(client *of, const nvs_ipc_request *request)
{
    nvs_ipc_answer reply = {.number = request->number, .result = NVS_IPC_STALE};
    int descriptors[NVS_IPC_CHUNKS];
    const opened *which = open_one(of, request);
    if (which != NULL && begin_driver())
        fill(which->export, request->first, &reply, descriptors);
    end_driver();
    /* A client has one request in flight, so the socket has room for the answer.  Deadline 0: never wait for a client. */
    const bool sent = nvs_ipc_send(of->socket, &reply, sizeof reply, descriptors, reply.here, 0);
    nvs_ipc_close_all(descriptors, reply.here);
    return sent;
}

/* False: the client has closed the connection, or broken the protocol. */
static bool serve(client *of)
{
    nvs_ipc_request request;
    uint32_t ignored;
    ssize_t got = nvs_ipc_receive(of->socket, &request, sizeof request, NULL, 0, &ignored, 0);
    if (got != (ssize_t)sizeof request || request.version != NVS_IPC_VERSION)
        return false;
    if (request.what == NVS_IPC_OPEN)
        return answer(of, &request);
    opened *which = find(of, &request.key);
    if (request.what != NVS_IPC_CLOSE)
        return false;
    if (which != NULL && --which->times == 0)
        close_one(of, which);
    return true;
}

/* --- clients --- */

static void close_client(server *of, uint32_t index)
{
    client *gone = &of->clients[index];
    const int socket = gone->socket;
    while (gone->opens != NULL)
        close_one(gone, gone->opens);
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
            if (of->polled[i].revents != 0 && !serve(&of->clients[i]))
                close_client(of, i);
        if (of->polled[clients].revents != 0)
            receiving = accept_client(of);
    }
    return NULL;
}

static bool start(void)
{
    server *made = calloc(1, sizeof *made);
    if (made == NULL || !nvs_ipc_make_secret(&own_name) || (made->listener = nvs_ipc_listen(&own_name)) < 0) {
        free(made);
        return false;
    }
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

/* The name of this process's socket; the first call starts the server.  False: it cannot start. */
static bool ipc_serve(nvs_ipc_secret *process)
{
    const int saved = errno, cancel = nvs_cancel_defer();
    pthread_mutex_lock(&server_lock);
    const bool runs = open_server != NULL || start();
    if (runs)
        *process = own_name;
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, "no socket or thread to share memory with other processes by (cuIpcGetMemHandle): %s", strerror(errno));
    pthread_mutex_unlock(&server_lock);
    nvs_cancel_allow(cancel);
    errno = saved;
    return runs;
}

bool nvs_ipc_is_own(const nvs_ipc_secret *process)
{
    pthread_mutex_lock(&server_lock);
    const bool own = open_server != NULL && nvs_ipc_same(process, &own_name);
    pthread_mutex_unlock(&server_lock);
    return own;
}

static NVS_FORK_CODE void ipc_server_after_fork(void)
{
    if (open_server != NULL) { /* else the parent's clients would not notice its end */
        for (uint32_t i = 0; i < open_server->count; i++)
            close(open_server->clients[i].socket);
        close(open_server->listener);
    }
    open_server = NULL;
    pthread_mutex_init(&server_lock, NULL); /* a thread that does not exist here may have held it, or the next */
    pthread_mutex_init(&driver_lock, NULL);
    atomic_store_explicit(&ending, false, memory_order_relaxed);
}

/* --- for the application --- */

CUresult nvs_ipc_export(const nvs_allocation *allocation, CUipcMemHandle *out)
{
    nvs_ipc_secret process;
    if (!nvs_share_possible(allocation->gpu)) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this GPU's memory that moves cannot be shared with other processes (cuIpcGetMemHandle): "
                                      "run this program with --memory device (NVSHARE_MEMORY=device)");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (!ipc_serve(&process))
        return CUDA_ERROR_MAP_FAILED;
    while (!find_handle(allocation, &process, out)) {
        nvs_ipc_export_entry *entry = calloc(1, sizeof *entry);
        if (entry == NULL)
            return CUDA_ERROR_OUT_OF_MEMORY;
        entry->address = allocation->key;
        entry->length = allocation->length;
        entry->gpu = allocation->gpu;
        CUresult result = nvs_ipc_make_secret(&entry->key) ? pin(allocation, &entry->share) : CUDA_ERROR_OPERATING_SYSTEM;
        if (result != CUDA_SUCCESS) {
            free(entry);
            return result;
        }
        if (!insert(entry))
            end(entry);
    }
    return CUDA_SUCCESS;
}

void nvs_ipc_withdraw(uint32_t gpu, CUdeviceptr address)
{
    if (NVS_LIKELY(atomic_load_explicit(&export_count, memory_order_relaxed) == 0)) /* see its declaration */
        return;
    pthread_mutex_lock(&lock);
    nvs_ipc_export_entry *entry = find_address(gpu, address);
    if (entry != NULL)
        entry->withdrawn = true;
    if (entry != NULL && !unlink_if_unused(entry))
        entry = NULL;
    pthread_mutex_unlock(&lock);
    if (entry != NULL)
        end(entry);
}

NVS_FORK_CODE void nvs_ipc_exports_after_fork(void)
{
    ipc_server_after_fork();
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    exports = NULL; /* their pins belong to the parent; the child cannot use CUDA */
    atomic_store_explicit(&export_count, 0, memory_order_relaxed);
}
