/* Wrappers of NVML functions: memory figures of the virtual card, in place of those of the real one.
 *
 * A GPU that this process computes on has the figures of cuMemGetInfo, by the same function of memory/memory.h.  Any other GPU, and
 * every GPU of a process without CUDA (nvidia-smi), has the limit of the environment, with nothing used; without a limit, the real
 * figures.  In lists of processes only the entry of this process changes: it has the bytes charged.
 *
 * A list has the process ids of the driver's PID namespace.  In a container with its own namespace this process is not found, and
 * the list does not change.
 *
 * The real function is called first; the wrapper returns its errors.  driver/nvml_api.def generates the wrappers.
 */
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"
#include "contexts/gpu.h"
#include "driver/library.h"
#include "hooks/hooks.h"
#include "memory/memory.h"

#include <errno.h>
#include <strings.h>
#include <unistd.h>

typedef int (*uuid_of)(nvs_nvml_device, char *, unsigned);
typedef int (*handle_of)(const char *, nvs_nvml_device *);

/* The card on which the process is, for a handle of the one that it began with; see contexts/gpu.h. */
static nvs_nvml_device present(nvs_nvml_device device)
{
    char uuid[96];
    CUuuid seen;
    nvs_gpu_facts facts;
    nvs_nvml_device found;
    if (NVS_LIKELY(!nvs_gpu_identity(0, &seen)))
        return device;
    const uuid_of get_uuid = (uuid_of)nvs_as_function(nvs_nvml_symbol("nvmlDeviceGetUUID"));
    const handle_of get_handle = (handle_of)nvs_as_function(nvs_nvml_symbol("nvmlDeviceGetHandleByUUID"));
    if (get_uuid == NULL || get_handle == NULL || get_uuid(device, uuid, sizeof uuid) != NVS_NVML_SUCCESS)
        return device;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && nvs_gpu_identity(gpu, &seen); gpu++)
        if (nvs_gpu_identity_is(gpu, uuid) && nvs_gpu_describe(gpu, &facts) == NVS_OK && get_handle(facts.uuid, &found) == NVS_NVML_SUCCESS)
            return found;
    return device;
}

/* The GPU of an NVML handle, if this process has a context there; else it has no ledger.  MIG instances have their own UUIDs. */
static uint32_t gpu_of(nvs_nvml_device device, nvs_gpu_facts *facts)
{
    char uuid[96];
    const uuid_of get_uuid = (uuid_of)nvs_as_function(nvs_nvml_symbol("nvmlDeviceGetUUID"));
    if (get_uuid == NULL || !nvs_driver_loaded() || get_uuid(device, uuid, sizeof uuid) != NVS_NVML_SUCCESS)
        return NVS_NO_GPU;
    /* Fails at once before cuInit. */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && nvs_gpu_describe(gpu, facts) == NVS_OK; gpu++)
        if (strcasecmp(facts->uuid, uuid) == 0)
            return nvs_any_context(gpu) != NULL ? gpu : NVS_NO_GPU;
    return NVS_NO_GPU;
}

/* In: the real figures.  Out: those of the virtual card; false: there is none. */
static bool virtual_card(nvs_nvml_device device, uint64_t *free_bytes, uint64_t *total_bytes)
{
    nvs_gpu_facts facts;
    const uint32_t gpu = gpu_of(device, &facts);
    if (gpu == NVS_NO_GPU) {
        const uint64_t limit = nvs_config.memory_limit;
        if (limit == 0 || limit > *total_bytes)
            return false;
        *free_bytes = *total_bytes = limit;
        return true;
    }
    if (!nvs_memory_manages(gpu))
        return false;
    /* NVML's total includes the driver's own memory; CUDA's total, to which the ledger's figures refer, does not. */
    const uint64_t usable = facts.total_bytes < *total_bytes ? facts.total_bytes : *total_bytes;
    uint64_t free_there = *free_bytes, total_there = usable;
    nvs_memory_virtual_info(gpu, &free_there, &total_there);
    if (total_there == usable && free_there == *free_bytes)
        return false;
    *free_bytes = free_there;
    *total_bytes = total_there;
    return true;
}

static void show_memory(nvs_nvml_device device, nvs_nvml_memory *memory)
{
    int saved = errno;
    if (virtual_card(device, &memory->free, &memory->total))
        memory->used = memory->total - memory->free;
    errno = saved;
}

static void show_memory_v2(nvs_nvml_device device, nvs_nvml_memory_v2 *memory)
{
    int saved = errno;
    if (memory->version != NVS_NVML_VERSIONED(nvs_nvml_memory_v2, 2)) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "nvmlDeviceGetMemoryInfo_v2: the version %#x is unknown, so the result is the memory of the whole GPU",
                     memory->version);
    } else if (virtual_card(device, &memory->free, &memory->total)) {
        memory->reserved = 0;
        memory->used = memory->total - memory->free;
    }
    errno = saved;
}

/* The bytes charged to this process on the device; false: it has no ledger there. */
static bool charged(nvs_nvml_device device, uint64_t *bytes)
{
    nvs_gpu_facts facts;
    nvs_usage usage;
    const uint32_t gpu = gpu_of(device, &facts);
    if (gpu == NVS_NO_GPU)
        return false;
    nvs_memory_usage(gpu, &usage);
    *bytes = usage.allocated_bytes;
    return true;
}

/* Lists of all versions: entries of one size, with the process id at offset 0 and the memory at offset 8. */
static void show_entries(nvs_nvml_device device, unsigned count, void *list, size_t size)
{
    int saved = errno;
    const uint32_t self = (uint32_t)getpid();
    uint64_t bytes = 0;
    bool asked = false;
    for (unsigned i = 0; list != NULL && i < count; i++) {
        nvs_nvml_process_v1 *entry = (nvs_nvml_process_v1 *)(void *)((char *)list + i * size);
        if (entry->process_id != self)
            continue;
        if (!asked && !charged(device, &bytes))
            break;
        asked = true;
        entry->used = bytes;
    }
    errno = saved;
}

_Static_assert(offsetof(nvs_nvml_process_v1, used) == offsetof(nvs_nvml_process, used), "show_entries");
_Static_assert(offsetof(nvs_nvml_process_v1, used) == offsetof(nvs_nvml_detail, used), "show_entries");

static void show_details(nvs_nvml_device device, nvs_nvml_detail_list *list)
{
    if (list->version == NVS_NVML_VERSIONED(nvs_nvml_detail_list, 1))
        show_entries(device, list->count, list->entries, sizeof *list->entries);
}

static int missing(void)
{
    return nvs_nvml_symbol("nvmlDeviceGetUUID") != NULL ? NVS_NVML_FUNCTION_NOT_FOUND : NVS_NVML_LIBRARY_NOT_FOUND;
}

#define NVS_NVML(symbol, parameters, arguments, change)                                                   \
    NVS_EXPORT int symbol parameters;                                                                     \
    NVS_EXPORT int symbol parameters                                                                      \
    {                                                                                                     \
        int(*const real) parameters = (int(*) parameters)nvs_as_function(nvs_nvml_real(NVS_NVML_##symbol)); \
        if (real == NULL)                                                                                 \
            return missing();                                                                             \
        if (nvs_config.enabled)                                                                           \
            device = present(device);                                                                     \
        const int result = real arguments;                                                                \
        if (result == NVS_NVML_SUCCESS && nvs_config.enabled)                                             \
            change;                                                                                       \
        return result;                                                                                    \
    }
#include "driver/nvml_api.def"

void *nvs_nvml_wrapper_of(nvs_nvml_id id)
{
    static const nvs_function wrappers[NVS_NVML_COUNT] = {
#define NVS_NVML(symbol, parameters, arguments, change) (nvs_function)symbol,
#include "driver/nvml_api.def"
    };
    return nvs_as_address(wrappers[id]);
}
