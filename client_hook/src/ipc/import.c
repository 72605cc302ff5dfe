/* What this process has opened of others' exports: where it is mapped, in which context, how often.  See ipc.h.
 *
 * The memory is not charged to this process: it is its maker's, who counts it as pinned while it is open here.
 *
 * Works in every memory mode, and without a coordinator: nothing here asks for one.
 *
 * May not go here: what is exported.
 */
#include "base/clock.h"
#include "base/process/futex.h"
#include "contexts/which_gpu.h"
#include "ipc/ipc.h"

#include "base/log.h"
#include "base/process/cancel.h"
#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "memory/memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct connection { /* the connection to one exporter */
    struct connection *next;
    nvs_ipc_secret process;
    int socket;        /* -1: not connected, or not any more */
    uint32_t users;    /* imports, and threads that talk; under the lock */
    uint32_t number;   /* of the last question */
    _Atomic uint32_t busy; /* futex: a thread talks.  Acquire and release: as a lock */
    int cancel;            /* of that thread, for nvs_cancel_allow */
} connection;

typedef struct import {
    struct import *next;
    connection *from;
    nvs_ipc_secret key;
    CUdeviceptr base;  /* of the chunks */
    uint64_t bytes;
    uint64_t mapped;   /* of these, from the start */
    uint64_t references;
    uint32_t allowed;  /* GPUs, by bit, that were given rights besides */
    nvs_ipc_import shown;
} import;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "imports" in the lock order of base/base.h */
NVS_FORK_STATE static connection *connections;
NVS_FORK_STATE static import *imports;
static uint64_t last_serial;

/* --- talking to an exporter --- */

/* The connection to a process, kept by the caller; made when it is first used. */
static connection *connection_of(const nvs_ipc_secret *process)
{
    connection *fresh = calloc(1, sizeof *fresh);
    pthread_mutex_lock(&lock);
    connection *at = connections;
    while (at != NULL && !nvs_ipc_same(&at->process, process))
        at = at->next;
    if (at == NULL && fresh != NULL) {
        *fresh = (connection){.next = connections, .process = *process, .socket = -1};
        at = connections = fresh;
        fresh = NULL;
    }
    if (at != NULL)
        at->users++;
    pthread_mutex_unlock(&lock);
    free(fresh);
    return at;
}

static void unref_connection(connection *of)
{
    pthread_mutex_lock(&lock);
    const bool last = --of->users == 0;
    connection **link = &connections;
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

static bool lock_connection(connection *of, uint64_t deadline_ns)
{
    while (atomic_exchange_explicit(&of->busy, 1, memory_order_acquire) != 0) { /* pairs with unlock_connection */
        if (nvs_now_ns() >= deadline_ns)
            return false;
        nvs_futex_wait(&of->busy, 1, deadline_ns);
    }
    of->cancel = nvs_cancel_defer();
    return true;
}

static void unlock_connection(connection *of)
{
    const int cancel = of->cancel;
    atomic_store_explicit(&of->busy, 0, memory_order_release); /* pairs with lock_connection */
    nvs_futex_wake(&of->busy, 1);
    nvs_cancel_allow(cancel);
}

static void disconnect(connection *of)
{
    const int socket = of->socket;
    of->socket = -1; /* before it is closed: a child that is forked just now must not close another's number */
    if (socket >= 0)
        close(socket);
}

/* Connects if need be.  False: the exporter is gone, or does not listen. */
static bool say(connection *of, nvs_ipc_request *what, uint64_t deadline_ns)
{
    if (of->socket < 0)
        of->socket = nvs_ipc_connect(&of->process, deadline_ns);
    what->version = NVS_IPC_VERSION;
    what->number = ++of->number;
    if (of->socket >= 0 && nvs_ipc_send(of->socket, what, sizeof *what, NULL, 0, deadline_ns))
        return true;
    disconnect(of);
    return false;
}

static bool is_sound(const nvs_ipc_answer *of, uint32_t count)
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

/* One part of an export, from a chunk on.  The descriptors are the caller's. */
static CUresult ask(connection *of, const nvs_ipc_secret *key, uint32_t first, nvs_ipc_answer *out, int *descriptors, uint64_t deadline_ns)
{
    nvs_ipc_request what = {.what = NVS_IPC_OPEN, .first = first, .key = *key};
    CUresult result = NVS_IPC_STALE;
    uint32_t count = 0;
    if (!lock_connection(of, deadline_ns))
        return CUDA_ERROR_MAP_FAILED;
    bool asked = say(of, &what, deadline_ns);
    while (asked) {
        const ssize_t got = nvs_ipc_receive(of->socket, out, sizeof *out, descriptors, NVS_IPC_CHUNKS, &count, deadline_ns);
        if (got == (ssize_t)sizeof *out && out->number == what.number && is_sound(out, count)) {
            result = (CUresult)out->result;
            break;
        }
        nvs_ipc_close_all(descriptors, count);
        count = 0;
        if (got == (ssize_t)sizeof *out && out->number != what.number)
            continue; /* to a question that was given up */
        result = got == 0 ? NVS_IPC_STALE : CUDA_ERROR_MAP_FAILED;
        if (got != -1)
            disconnect(of); /* its end, or something that it should not say */
        break;
    }
    unlock_connection(of);
    return result;
}

/* The exporter need not keep it for us any more. */
static void tell_closed(connection *of, const nvs_ipc_secret *key)
{
    nvs_ipc_request what = {.what = NVS_IPC_CLOSE, .key = *key};
    const uint64_t deadline = nvs_now_ns() + NVS_IPC_PATIENCE_NS / 10;
    if (!lock_connection(of, deadline))
        return; /* it hears of it when the connection ends */
    if (of->socket >= 0)
        (void)say(of, &what, deadline);
    unlock_connection(of);
}

/* --- mapping --- */

static void unmap(import *which)
{
    if (which->mapped != 0 && NVS_REAL(cuMemUnmap)(which->base, which->mapped) != CUDA_SUCCESS &&
        NVS_REAL(cuMemUnmap)(which->base, which->mapped) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not unmap memory of another process; it is kept until this program ends");
    else if (which->base != 0)
        NVS_REAL(cuMemAddressFree)(which->base, which->bytes);
    which->base = 0;
    which->mapped = 0;
}

/* The descriptors of one answer, whatever comes of them, are closed. */
static CUresult map_part(import *which, const nvs_ipc_answer *part, const int *descriptors)
{
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < part->here && result == CUDA_SUCCESS; i++) {
        CUmemGenericAllocationHandle handle;
        if (part->bytes[i] > which->bytes - which->mapped) {
            result = CUDA_ERROR_MAP_FAILED;
            break;
        }
        result = NVS_REAL(cuMemImportFromShareableHandle)(&handle, (void *)(uintptr_t)descriptors[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result != CUDA_SUCCESS)
            break;
        result = NVS_REAL(cuMemMap)(which->base + which->mapped, part->bytes[i], 0, handle, 0);
        if (result == CUDA_SUCCESS)
            which->mapped += part->bytes[i];
        NVS_REAL(cuMemRelease)(handle); /* the mapping keeps the memory */
    }
    nvs_ipc_close_all(descriptors, part->here);
    return result;
}

/* For the importing GPU, and for the one whose memory it is, if that is another and this process sees it. */
static CUresult allow(import *which)
{
    const CUmemAccessDesc here = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)which->shown.gpu},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUmemAccessDesc owner = here;
    CUresult result = NVS_REAL(cuMemSetAccess)(which->base, which->bytes, &here, 1);
    if (result == CUDA_SUCCESS &&
        NVS_REAL(cuPointerGetAttribute)(&owner.location.id, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, which->base) == CUDA_SUCCESS &&
        owner.location.id >= 0 && owner.location.id != here.location.id)
        (void)NVS_REAL(cuMemSetAccess)(which->base, which->bytes, &owner, 1); /* copies from there may be made by either GPU */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && result == CUDA_SUCCESS; gpu++)
        if (nvs_ipc_has_access(which->shown.gpu, gpu) && nvs_ipc_give(which->base, which->bytes, gpu))
            which->allowed |= UINT32_C(1) << gpu;
    return result;
}

static CUresult fetch(import *which, uint64_t deadline_ns)
{
    nvs_ipc_answer part;
    int descriptors[NVS_IPC_CHUNKS];
    uint32_t done = 0, chunks = 1;
    CUresult result = CUDA_SUCCESS;
    for (; done < chunks && result == CUDA_SUCCESS; done += part.here) {
        result = ask(which->from, &which->key, done, &part, descriptors, deadline_ns);
        if (result != CUDA_SUCCESS)
            return result;
        if (done == 0) {
            which->bytes = part.total_bytes;
            chunks = part.chunks;
            result = NVS_REAL(cuMemAddressReserve)(&which->base, which->bytes, 0, 0, 0);
            if (result != CUDA_SUCCESS) {
                which->base = 0;
                nvs_ipc_close_all(descriptors, part.here);
                return result;
            }
            which->shown.address = which->base + part.offset;
            which->shown.length = part.length;
        }
        result = map_part(which, &part, descriptors);
    }
    if (result == CUDA_SUCCESS && which->mapped != which->bytes)
        result = CUDA_ERROR_MAP_FAILED;
    return result == CUDA_SUCCESS ? allow(which) : result;
}

/* --- the table --- */

/* Locked. */
static import *find(const nvs_ipc_secret *key, uint32_t gpu)
{
    import *at = imports;
    while (at != NULL && (at->shown.gpu != gpu || !nvs_ipc_same(&at->key, key)))
        at = at->next;
    return at;
}

static bool open_again(const nvs_ipc_secret *key, uint32_t gpu, CUdeviceptr *out)
{
    pthread_mutex_lock(&lock);
    import *at = find(key, gpu);
    if (at != NULL) {
        at->references++;
        *out = at->shown.address;
    }
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

/* Another thread may have been quicker: then it is its mapping that counts. */
static bool insert(import *which)
{
    pthread_mutex_lock(&lock);
    import *first = find(&which->key, which->shown.gpu);
    if (first == NULL) {
        which->references = 0; /* whoever opens it counts: open_again */
        which->shown.serial = (UINT64_C(1) << 62) + ++last_serial; /* none that an allocation of this process has */
        which->next = imports;
        imports = which;
        atomic_fetch_add_explicit(&nvs_hot.imports, 1, memory_order_relaxed); /* see base/hot.h */
    }
    pthread_mutex_unlock(&lock);
    return first == NULL;
}

/* Everything that one import took, which is in no table any more. */
static void end(import *which)
{
    unmap(which);
    tell_closed(which->from, &which->key);
    unref_connection(which->from);
    free(which);
}

static CUresult open_new(const nvs_ipc_handle *handle, uint32_t gpu, CUcontext context)
{
    import *made = calloc(1, sizeof *made);
    if (made == NULL || (made->from = connection_of(&handle->process)) == NULL) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->key = handle->key;
    made->shown = (nvs_ipc_import){.gpu = gpu, .context = context};
    CUresult result = fetch(made, nvs_now_ns() + NVS_IPC_PATIENCE_NS);
    if (result != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "memory of process %d could not be opened (cuIpcOpenMemHandle, error %d): %s", (int)handle->process_id, (int)result,
                     result == NVS_IPC_STALE ? "it has ended or freed the memory, is another user's, or in another network namespace"
                                             : "it did not answer in time, or the driver refused");
    if (result != CUDA_SUCCESS || !insert(made))
        end(made);
    return result;
}

CUresult nvs_ipc_open(const nvs_ipc_handle *handle, CUdeviceptr *out)
{
    const uint32_t gpu = nvs_current_gpu();
    const CUcontext context = nvs_owner_context();
    const int saved = errno;
    CUresult result = CUDA_SUCCESS;
    if (handle->version != NVS_IPC_VERSION)
        return CUDA_ERROR_INVALID_VALUE;
    if (context == NULL || gpu == NVS_NO_GPU)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (nvs_ipc_is_own(&handle->process))
        return NVS_IPC_OWN;
    nvs_ipc_prepare();
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a capture of this thread's must not notice what we call */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    while (result == CUDA_SUCCESS && !open_again(&handle->key, gpu, out))
        result = open_new(handle, gpu, context);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    errno = saved;
    return result;
}

/* Locked.  Takes out one that begins at an address, or (0) was opened in a context. */
static import *take(CUdeviceptr address, CUcontext context)
{
    import **link = &imports;
    while (*link != NULL && (address != 0 ? (*link)->shown.address != address : (*link)->shown.context != context))
        link = &(*link)->next;
    import *found = *link;
    if (found != NULL) {
        *link = found->next;
        atomic_fetch_sub_explicit(&nvs_hot.imports, 1, memory_order_relaxed); /* see base/hot.h */
    }
    return found;
}

/* It could not be closed: it is open as before. */
static void put_back(import *which)
{
    pthread_mutex_lock(&lock);
    which->references++;
    which->next = imports;
    imports = which;
    atomic_fetch_add_explicit(&nvs_hot.imports, 1, memory_order_relaxed); /* see base/hot.h */
    pthread_mutex_unlock(&lock);
}

bool nvs_ipc_close(CUdeviceptr address, CUresult *result)
{
    const int saved = errno;
    if (address == 0 || atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0) /* see base/hot.h */
        return false;
    pthread_mutex_lock(&lock);
    import *at = imports, *last = NULL;
    while (at != NULL && at->shown.address != address)
        at = at->next;
    if (at != NULL && --at->references == 0)
        last = take(address, NULL);
    pthread_mutex_unlock(&lock);
    *result = CUDA_SUCCESS;
    if (last != NULL) { /* what still uses it must have ended first, as the driver sees to it */
        *result = nvs_memory_settle(last->shown.gpu, last->shown.context);
        if (*result == CUDA_SUCCESS)
            end(last);
        else
            put_back(last);
    }
    errno = saved;
    return at != NULL;
}

void nvs_ipc_context_gone(CUcontext context)
{
    if (NVS_LIKELY(atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0)) /* see base/hot.h */
        return;
    const int saved = errno;
    for (import *gone = NULL;;) {
        pthread_mutex_lock(&lock);
        gone = take(0, context);
        pthread_mutex_unlock(&lock);
        if (gone == NULL)
            break;
        end(gone);
    }
    errno = saved;
}

bool nvs_ipc_imported(CUdeviceptr pointer, nvs_ipc_import *out)
{
    if (NVS_LIKELY(atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0)) /* see base/hot.h */
        return false;
    pthread_mutex_lock(&lock);
    const import *at = imports;
    while (at != NULL && pointer - at->shown.address >= at->shown.length)
        at = at->next;
    if (at != NULL)
        *out = at->shown;
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

/* --- access of other GPUs: reach.c --- */

bool nvs_ipc_find_closed(CUdeviceptr pointer, uint32_t owner, uint32_t gpu, CUdeviceptr *base, uint64_t *bytes)
{
    pthread_mutex_lock(&lock);
    const import *at = imports;
    while (at != NULL && (at->shown.gpu == gpu || (at->allowed >> gpu & 1) != 0 ||
                          (pointer != 0 ? pointer - at->shown.address >= at->shown.length : at->shown.gpu != owner)))
        at = at->next;
    if (at != NULL) {
        *base = at->base;
        *bytes = at->bytes;
    }
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

void nvs_ipc_note_open(CUdeviceptr base, uint32_t gpu)
{
    pthread_mutex_lock(&lock);
    for (import *at = imports; at != NULL; at = at->next)
        if (at->base == base) /* else it was closed meanwhile */
            at->allowed |= UINT32_C(1) << gpu;
    pthread_mutex_unlock(&lock);
}

/* --- fork --- */

NVS_FORK_CODE static void in_child(void)
{
    const int saved = errno;
    nvs_ipc_server_after_fork();
    nvs_ipc_exports_after_fork();
    nvs_ipc_imports_after_fork();
    errno = saved;
}

static void prepare(void)
{
    if (pthread_atfork(NULL, NULL, in_child) != 0)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "no memory for the fork handler; children of this process must not use CUDA");
}

void nvs_ipc_prepare(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, prepare);
}

NVS_FORK_CODE void nvs_ipc_imports_after_fork(void)
{
    for (const connection *at = connections; at != NULL; at = at->next)
        if (at->socket >= 0)
            close(at->socket); /* else the exporter would not notice the parent's end */
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    connections = NULL;
    imports = NULL; /* CUDA is not usable here */
    atomic_store_explicit(&nvs_hot.imports, 0, memory_order_relaxed);
}
