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
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "ipc/ipc.h"
#include "ipc/mapping.h"
#include "ipc/server.h"
#include "memory/memory.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

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
    nvs_ipc_unmap(&which->mapping);
    nvs_ipc_notify_closed(which->from, &which->key);
    nvs_ipc_connection_unref(which->from);
    free(which);
}

static void give_peers_access(import *which)
{
    const uint32_t peers = atomic_load_explicit(&accessors[which->facts.gpu], memory_order_relaxed); /* see its declaration */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((peers >> gpu & 1) != 0 && gpu != which->facts.gpu && nvs_ipc_give_access(which->mapping.base, which->mapping.bytes, gpu) == CUDA_SUCCESS)
            which->allowed |= UINT32_C(1) << gpu;
}

static CUresult open_new(const nvs_ipc_handle *handle, uint32_t gpu, CUcontext context)
{
    import *made = calloc(1, sizeof *made);
    if (made == NULL || (made->from = nvs_ipc_connection_to(&handle->process)) == NULL) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->key = handle->key;
    CUresult result = nvs_ipc_map(made->from, &made->key, gpu, nvs_now_ns() + NVS_IPC_TIMEOUT_NS, &made->mapping);
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
    if (nvs_ipc_give_access(mapping->base, mapping->bytes, gpu) != CUDA_SUCCESS)
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
    nvs_ipc_connections_after_fork();
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    imports = NULL;                  /* CUDA is not usable here */
    atomic_store_explicit(&nvs_hot.imports, 0, memory_order_relaxed);
}
