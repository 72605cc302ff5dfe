/* The exports of this process: their chunks, their keys, and the number of processes that have each open.
 *
 * An export lives, with its chunks pinned, until the program has freed the memory and no other process has it open.
 *
 * Non-goals: sockets, threads.
 */
#include "base/base.h"
#include "base/log.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "ipc/ipc.h"
#include "ipc/server.h"
#include "swap/swap.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

/* --- for the server --- */

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

static void answer(const nvs_ipc_export_entry *held, uint32_t first, nvs_ipc_answer *out, int *descriptors)
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

static const nvs_ipc_exports served = {.hold = hold, .unref = unref, .answer = answer};

/* --- for the application --- */

CUresult nvs_ipc_export(const nvs_allocation *allocation, CUipcMemHandle *out)
{
    nvs_ipc_secret process;
    if (!nvs_share_possible(allocation->gpu)) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this GPU's memory that moves cannot be shared with other processes (cuIpcGetMemHandle): "
                                      "run this program with --memory device (NVSHARE_MEMORY=device)");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    if (!nvs_ipc_serve(&served, &process))
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
    nvs_ipc_server_after_fork();
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    exports = NULL; /* their pins belong to the parent; the child cannot use CUDA */
    atomic_store_explicit(&export_count, 0, memory_order_relaxed);
}
