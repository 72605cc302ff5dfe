/* What this process has exported: which chunks, under which key, and how many others have it open.  See ipc.h.
 *
 * An export lives until the program has freed its memory and nobody has it open any more; so long its chunks are pinned.
 *
 * May not go here: sockets, threads.
 */
#include "base/port.h"
#include "ipc/ipc.h"

#include "base/log.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
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
    uint32_t holders; /* processes that have it open, each once; and whoever looks at it just now */
    bool withdrawn;   /* the program has freed it: its handle is void */
    nvs_share share;
};

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "exports" in the lock order of base/base.h */
NVS_FORK_STATE static nvs_ipc_export_entry *exports;
NVS_FORK_STATE static _Atomic uint32_t export_count; /* relaxed: a thread that frees memory has exported it, or was told of it, before */

static nvs_ipc_export_entry *find_address(uint32_t gpu, CUdeviceptr address)
{
    nvs_ipc_export_entry *at = exports;
    while (at != NULL && (at->gpu != gpu || at->address != address || at->withdrawn))
        at = at->next;
    return at;
}

/* Locked.  Takes one out that nobody needs any more; then it is the caller's to end. */
static bool unlink_if_over(nvs_ipc_export_entry *entry)
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

static void describe(const nvs_ipc_export_entry *entry, const nvs_ipc_secret *process, nvs_ipc_handle *out)
{
    *out = (nvs_ipc_handle){.version = NVS_IPC_VERSION, .process_id = getpid(), .process = *process, .key = entry->key, .length = entry->length};
    memcpy(out->magic, MAGIC, sizeof MAGIC);
}

bool nvs_ipc_is_ours(const CUipcMemHandle *handle)
{
    return memcmp(handle->reserved, MAGIC, sizeof MAGIC) == 0;
}

/* The handle of what was exported before.  False: it was not. */
static bool known(const nvs_allocation *allocation, const nvs_ipc_secret *process, nvs_ipc_handle *out)
{
    pthread_mutex_lock(&lock);
    const nvs_ipc_export_entry *entry = find_address(allocation->gpu, allocation->key);
    if (entry != NULL)
        describe(entry, process, out);
    pthread_mutex_unlock(&lock);
    return entry != NULL;
}

/* Another thread may have been quicker: then it is its handle that counts. */
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
    const CUresult result = nvs_share_begin(gpu, allocation->kept, allocation->key, allocation->length, out);
    nvs_gate_leave(slot, gpu);
    if (result == CUDA_SUCCESS)
        nvs_coordinator.memory_changed(gpu);
    return result;
}

CUresult nvs_ipc_export(const nvs_allocation *allocation, nvs_ipc_handle *out)
{
    nvs_ipc_secret process;
    if (!nvs_share_possible(allocation->gpu)) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this GPU's memory that moves cannot be shared with other processes (cuIpcGetMemHandle): "
                                      "run this program with --memory device (NVSHARE_MEMORY=device)");
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    nvs_ipc_prepare();
    if (!nvs_ipc_serve(&process))
        return CUDA_ERROR_MAP_FAILED;
    while (!known(allocation, &process, out)) {
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
    if (entry != NULL && !unlink_if_over(entry))
        entry = NULL;
    pthread_mutex_unlock(&lock);
    if (entry != NULL)
        end(entry);
}

/* --- for the server --- */

nvs_ipc_export_entry *nvs_ipc_hold(const nvs_ipc_secret *key)
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

void nvs_ipc_unref(nvs_ipc_export_entry *held)
{
    pthread_mutex_lock(&lock);
    held->holders--;
    const bool over = unlink_if_over(held);
    pthread_mutex_unlock(&lock);
    if (over)
        end(held);
}

void nvs_ipc_answer_open(const nvs_ipc_export_entry *held, uint32_t first, nvs_ipc_answer *out, int *descriptors)
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

NVS_FORK_CODE void nvs_ipc_exports_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    exports = NULL; /* what they pinned belongs to the parent; the child cannot use CUDA */
    atomic_store_explicit(&export_count, 0, memory_order_relaxed);
}
