/* The exports of other processes that this process has open: each import's mapping, context and count.
 *
 * Imports are not charged to this process: the exporter counts the memory as pinned.  They work in every memory mode, and without a
 * coordinator.
 *
 * The GPU that opened an import has access to it.  Another GPU of the program gets access with peer access, or when a call for that GPU names
 * the memory, because the driver copies imported memory for any GPU.
 *
 * Non-goals: exports.
 */
#include "base/hot.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "ipc/ipc.h"
#include "ipc/socket.h"
#include "memory/memory.h"
#include "swap/swap.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* --- connections to exporters, one for each process, shared by the imports from it --- */

typedef struct nvs_ipc_connection nvs_ipc_connection;

struct nvs_ipc_connection {
    struct nvs_ipc_connection *next;
    nvs_ipc_secret process;
    int socket;            /* -1: not connected */
    uint32_t users;        /* under the lock */
    uint32_t number;       /* of the last request */
    _Atomic uint32_t busy; /* futex: 1 while a thread uses the socket.  Acquire and release: as a lock */
    int cancel;            /* that thread's state, for nvs_cancel_allow */
};

NVS_FORK_STATE static pthread_mutex_t connections_lock = PTHREAD_MUTEX_INITIALIZER; /* "connections" in the lock order of base/base.h */
NVS_FORK_STATE static nvs_ipc_connection *connections;

/* The connection to a process, with one more user.  The first request connects it.  NULL: no memory. */
static nvs_ipc_connection *ipc_connection_to(const nvs_ipc_secret *process)
{
    nvs_ipc_connection *fresh = calloc(1, sizeof *fresh);
    pthread_mutex_lock(&connections_lock);
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
    pthread_mutex_unlock(&connections_lock);
    free(fresh);
    return at;
}

static void ipc_connection_unref(nvs_ipc_connection *of)
{
    pthread_mutex_lock(&connections_lock);
    const bool last = --of->users == 0;
    nvs_ipc_connection **link = &connections;
    while (last && *link != of)
        link = &(*link)->next;
    if (last)
        *link = of->next;
    pthread_mutex_unlock(&connections_lock);
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

/* Fetches the chunks of an export from `first` on, as many as fit an answer.  The caller owns the descriptors. */
static CUresult ipc_fetch(nvs_ipc_connection *of, const nvs_ipc_secret *key, uint32_t first, nvs_ipc_answer *out, int *descriptors, uint64_t deadline_ns)
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

static void ipc_notify_closed(nvs_ipc_connection *of, const nvs_ipc_secret *key)
{
    nvs_ipc_request request = {.what = NVS_IPC_CLOSE, .key = *key};
    const uint64_t deadline = nvs_now_ns() + NVS_IPC_TIMEOUT_NS / 10;
    if (!lock_connection(of, deadline))
        return; /* the exporter notices when the connection ends */
    if (of->socket >= 0)
        (void)send_request(of, &request, deadline);
    unlock_connection(of);
}

static NVS_FORK_CODE void ipc_connections_after_fork(void)
{
    for (const nvs_ipc_connection *at = connections; at != NULL; at = at->next)
        if (at->socket >= 0)
            close(at->socket); /* else the exporter would not notice the parent's end */
    pthread_mutex_init(&connections_lock, NULL); /* a thread that does not exist here may have held it */
    connections = NULL;
}

/* --- mappings: the chunks of one export, at contiguous addresses in this process --- */

typedef struct nvs_ipc_mapping {
    CUdeviceptr base;
    uint64_t bytes;      /* of all chunks */
    uint64_t mapped;     /* bytes mapped, from the base on */
    CUdeviceptr address; /* of the allocation */
    uint64_t length;
} nvs_ipc_mapping;

static void ipc_unmap(nvs_ipc_mapping *mapping)
{
    if (mapping->mapped != 0 && nvs_vmm_unmap(mapping->base, mapping->mapped) != CUDA_SUCCESS)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the driver does not unmap memory of another process; it is kept until this program ends");
    else if (mapping->base != 0)
        NVS_REAL(cuMemAddressFree)(mapping->base, mapping->bytes);
    mapping->base = 0;
    mapping->mapped = 0;
}

/* Closes the descriptors, also on failure. */
static CUresult map_part(nvs_ipc_mapping *mapping, const nvs_ipc_answer *part, const int *descriptors)
{
    CUresult result = CUDA_SUCCESS;
    for (uint32_t i = 0; i < part->here && result == CUDA_SUCCESS; i++) {
        CUmemGenericAllocationHandle handle;
        if (part->bytes[i] > mapping->bytes - mapping->mapped) {
            result = CUDA_ERROR_MAP_FAILED;
            break;
        }
        result = NVS_REAL(cuMemImportFromShareableHandle)(&handle, (void *)(uintptr_t)descriptors[i], CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        if (result != CUDA_SUCCESS)
            break;
        result = NVS_REAL(cuMemMap)(mapping->base + mapping->mapped, part->bytes[i], 0, handle, 0);
        if (result == CUDA_SUCCESS)
            mapping->mapped += part->bytes[i];
        NVS_REAL(cuMemRelease)(handle); /* the mapping keeps the memory */
    }
    nvs_ipc_close_all(descriptors, part->here);
    return result;
}

static CUresult ipc_give_access(CUdeviceptr base, uint64_t bytes, uint32_t gpu)
{
    const CUmemAccessDesc desc = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = (int)gpu}, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    return NVS_REAL(cuMemSetAccess)(base, bytes, &desc, 1);
}

/* Gives access to the importing GPU, and to the GPU that holds the memory if this process sees it. */
static CUresult give_both_access(const nvs_ipc_mapping *mapping, uint32_t gpu)
{
    int owner;
    const CUresult result = ipc_give_access(mapping->base, mapping->bytes, gpu);
    if (result == CUDA_SUCCESS && NVS_REAL(cuPointerGetAttribute)(&owner, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, mapping->base) == CUDA_SUCCESS &&
        owner >= 0 && owner != (int)gpu)
        (void)ipc_give_access(mapping->base, mapping->bytes, (uint32_t)owner); /* either GPU may carry out a copy */
    return result;
}

/* Maps an export with access for a GPU.  After a failure, too, ipc_unmap removes the mapping. */
static CUresult ipc_map(nvs_ipc_connection *from, const nvs_ipc_secret *key, uint32_t gpu, uint64_t deadline_ns, nvs_ipc_mapping *out)
{
    nvs_ipc_answer part;
    int descriptors[NVS_IPC_CHUNKS];
    uint32_t done = 0, chunks = 1;
    CUresult result = CUDA_SUCCESS;
    *out = (nvs_ipc_mapping){0};
    for (; done < chunks && result == CUDA_SUCCESS; done += part.here) {
        result = ipc_fetch(from, key, done, &part, descriptors, deadline_ns);
        if (result != CUDA_SUCCESS)
            return result;
        if (done == 0) {
            out->bytes = part.total_bytes;
            chunks = part.chunks;
            result = NVS_REAL(cuMemAddressReserve)(&out->base, out->bytes, 0, 0, 0);
            if (result != CUDA_SUCCESS) {
                out->base = 0;
                nvs_ipc_close_all(descriptors, part.here);
                return result;
            }
            out->address = out->base + part.offset;
            out->length = part.length;
        }
        result = map_part(out, &part, descriptors);
    }
    if (result == CUDA_SUCCESS && out->mapped != out->bytes)
        result = CUDA_ERROR_MAP_FAILED;
    return result == CUDA_SUCCESS ? give_both_access(out, gpu) : result;
}

/* --- imports --- */

typedef struct import {
    struct import *next;
    nvs_ipc_connection *from;
    nvs_ipc_secret key;
    nvs_ipc_mapping mapping;
    uint64_t references; /* opens without a close */
    uint32_t allowed;    /* other GPUs, by bit, that were given access */
    nvs_ipc_import facts;
} import;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "imports" in the lock order of base/base.h */
NVS_FORK_STATE static import *imports;
static uint64_t last_serial;

/* For each GPU: the GPUs, by bit, with peer access to it.  Relaxed: an open is not ordered with a concurrent change of peer access. */
static _Atomic uint32_t accessors[NVS_MAX_GPUS];

/* --- the table --- */

/* Locked. */
static import *find(const nvs_ipc_secret *key, uint32_t gpu)
{
    import *at = imports;
    while (at != NULL && (at->facts.gpu != gpu || !nvs_ipc_same(&at->key, key)))
        at = at->next;
    return at;
}

static bool open_again(const nvs_ipc_secret *key, uint32_t gpu, CUdeviceptr *out)
{
    pthread_mutex_lock(&lock);
    import *at = find(key, gpu);
    if (at != NULL) {
        at->references++;
        *out = at->facts.address;
    }
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

/* False: another thread has opened the export meanwhile, and its mapping stays. */
static bool insert(import *which)
{
    pthread_mutex_lock(&lock);
    import *first = find(&which->key, which->facts.gpu);
    if (first == NULL) {
        which->references = 0; /* open_again counts */
        which->facts.serial = (UINT64_C(1) << 62) + ++last_serial; /* no allocation of this process has it */
        which->next = imports;
        imports = which;
        atomic_fetch_add_explicit(&nvs_hot.imports, 1, memory_order_relaxed); /* see base/hot.h */
    }
    pthread_mutex_unlock(&lock);
    return first == NULL;
}

/* Unmaps and frees an import that is not in the table. */
static void end(import *which)
{
    ipc_unmap(&which->mapping);
    ipc_notify_closed(which->from, &which->key);
    ipc_connection_unref(which->from);
    free(which);
}

static void give_peers_access(import *which)
{
    const uint32_t peers = atomic_load_explicit(&accessors[which->facts.gpu], memory_order_relaxed); /* see its declaration */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((peers >> gpu & 1) != 0 && gpu != which->facts.gpu && ipc_give_access(which->mapping.base, which->mapping.bytes, gpu) == CUDA_SUCCESS)
            which->allowed |= UINT32_C(1) << gpu;
}

static CUresult open_new(const nvs_ipc_handle *handle, uint32_t gpu, CUcontext context)
{
    import *made = calloc(1, sizeof *made);
    if (made == NULL || (made->from = ipc_connection_to(&handle->process)) == NULL) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->key = handle->key;
    CUresult result = ipc_map(made->from, &made->key, gpu, nvs_now_ns() + NVS_IPC_TIMEOUT_NS, &made->mapping);
    made->facts = (nvs_ipc_import){.address = made->mapping.address, .length = made->mapping.length, .gpu = gpu, .context = context};
    if (result == CUDA_SUCCESS)
        give_peers_access(made);
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, "memory of process %d could not be opened (cuIpcOpenMemHandle, error %d): %s", (int)handle->process_id, (int)result,
                     result == NVS_IPC_STALE ? "it has ended or freed the memory, is another user's, or in another network namespace"
                                             : "it did not answer in time, or the driver refused");
    if (result != CUDA_SUCCESS || !insert(made))
        end(made);
    return result;
}

CUresult nvs_ipc_open(const CUipcMemHandle *from, CUdeviceptr *out)
{
    nvs_ipc_handle handle;
    const uint32_t gpu = nvs_current_gpu();
    const CUcontext context = nvs_owner_context();
    const int saved = errno;
    CUresult result = CUDA_SUCCESS;
    memcpy(&handle, from, sizeof handle);
    if (handle.version != NVS_IPC_VERSION)
        return CUDA_ERROR_INVALID_VALUE;
    if (context == NULL || gpu == NVS_NO_GPU)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (nvs_ipc_is_own(&handle.process))
        return CUDA_ERROR_INVALID_CONTEXT; /* as the driver says */
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* a capture of this thread is not invalidated */
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    while (result == CUDA_SUCCESS && !open_again(&handle.key, gpu, out))
        result = open_new(&handle, gpu, context);
    NVS_REAL(cuThreadExchangeStreamCaptureMode)(&mode);
    errno = saved;
    return result;
}

/* Locked.  Removes the import at an address from the table; address 0: one that was opened in the context. */
static import *take(CUdeviceptr address, CUcontext context)
{
    import **link = &imports;
    while (*link != NULL && (address != 0 ? (*link)->facts.address != address : (*link)->facts.context != context))
        link = &(*link)->next;
    import *found = *link;
    if (found != NULL) {
        *link = found->next;
        atomic_fetch_sub_explicit(&nvs_hot.imports, 1, memory_order_relaxed); /* see base/hot.h */
    }
    return found;
}

/* Restores an import whose close failed. */
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
    while (at != NULL && at->facts.address != address)
        at = at->next;
    if (at != NULL && --at->references == 0)
        last = take(address, NULL);
    pthread_mutex_unlock(&lock);
    *result = CUDA_SUCCESS;
    if (last != NULL) { /* as in the driver, work that uses it ends first */
        *result = nvs_memory_wait_idle(last->facts.gpu, last->facts.context);
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
    while (at != NULL && pointer - at->facts.address >= at->facts.length)
        at = at->next;
    if (at != NULL)
        *out = at->facts;
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

/* --- access of other GPUs --- */

/* Finds an import that a GPU has no access to: the one that contains `pointer`, or (0) any that `owner` has open. */
static bool find_without_access(CUdeviceptr pointer, uint32_t owner, uint32_t gpu, nvs_ipc_mapping *out)
{
    pthread_mutex_lock(&lock);
    const import *at = imports;
    while (at != NULL && (at->facts.gpu == gpu || (at->allowed >> gpu & 1) != 0 ||
                          (pointer != 0 ? pointer - at->facts.address >= at->facts.length : at->facts.gpu != owner)))
        at = at->next;
    if (at != NULL)
        *out = at->mapping;
    pthread_mutex_unlock(&lock);
    return at != NULL;
}

static bool give_access(const nvs_ipc_mapping *mapping, uint32_t gpu)
{
    if (ipc_give_access(mapping->base, mapping->bytes, gpu) != CUDA_SUCCESS)
        return false;
    pthread_mutex_lock(&lock);
    for (import *at = imports; at != NULL; at = at->next)
        if (at->mapping.base == mapping->base) /* else it has been closed meanwhile */
            at->allowed |= UINT32_C(1) << gpu;
    pthread_mutex_unlock(&lock);
    return true;
}

bool nvs_ipc_allow(CUdeviceptr pointer, uint32_t gpu)
{
    nvs_ipc_mapping mapping;
    if (NVS_LIKELY(atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) == 0) || gpu >= NVS_MAX_GPUS || /* see base/hot.h */
        !find_without_access(pointer, NVS_NO_GPU, gpu, &mapping))
        return true;
    return give_access(&mapping, gpu);
}

void nvs_ipc_enable_peer(uint32_t owner, uint32_t accessor)
{
    nvs_ipc_mapping mapping;
    atomic_fetch_or_explicit(&accessors[owner], UINT32_C(1) << accessor, memory_order_relaxed); /* see its declaration */
    while (find_without_access(0, owner, accessor, &mapping) && give_access(&mapping, accessor))
        continue;
}

NVS_FORK_CODE void nvs_ipc_imports_after_fork(void)
{
    ipc_connections_after_fork();
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    imports = NULL;                  /* CUDA is not usable here */
    atomic_store_explicit(&nvs_hot.imports, 0, memory_order_relaxed);
}
