/* The figures behind hooks/memory/nvml.c, and NVML's real functions.  See nvml.h.
 *
 * May not go here: what a quota is (memory/memory.c).
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "driver/nvml.h"

#include "coord/agent.h"
#include "driver/contexts/context.h"
#include "base/log.h"
#include "memory/memory.h"
#include "driver/resolve.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static const char *const names[NVS_NVML_COUNT] = {
#define NVS_NVML(symbol, parameters, arguments, change) #symbol,
#include "driver/nvml_api.def"
};

nvs_nvml_id nvs_nvml_id_of_name(const char *name)
{
    for (unsigned id = 0; id < NVS_NVML_COUNT; id++)
        if (strcmp(names[id], name) == 0)
            return (nvs_nvml_id)id;
    return NVS_NVML_COUNT;
}

/* The handle is given back at once: an application that closes NVML really unloads it. */
void *nvs_nvml_symbol(const char *name)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    if (real == NULL)
        return NULL;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (library == NULL)
        dlerror(); /* ours, not the application's */
    void *address = real(library != NULL ? library : RTLD_NEXT, name);
    if (address == NULL)
        dlerror();
    if (library != NULL)
        dlclose(library);
    return address;
}

/* Asked anew every time, unlike the driver's: NVML may have been unloaded and loaded elsewhere meanwhile, and no call of it is so
 * quick that a look-up would be felt. */
void *nvs_nvml_real(nvs_nvml_id id)
{
    int saved = errno;
    void *address = nvs_nvml_symbol(names[id]);
    errno = saved;
    return address;
}

bool nvs_nvml_found(nvs_nvml_id id, void *handle)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    void *address = real != NULL ? real(handle, names[id]) : NULL;
    return address != NULL && address == nvs_nvml_symbol(names[id]);
}

/* Does this process compute on this GPU?  Only then is there a ledger, and only then may the coordinator be asked. */
static bool found_one(CUcontext context, void *argument)
{
    *(bool *)argument = true;
    return false;
}

static bool in_use(uint32_t gpu)
{
    bool found = false;
    nvs_each_context(gpu, found_one, &found);
    return found;
}

/* The GPU behind an NVML handle if this process computes on it.  MIG instances have UUIDs of their own. */
static uint32_t gpu_of(nvs_nvml_device device, nvs_gpu_facts *facts)
{
    char uuid[96];
    void *address = nvs_nvml_symbol("nvmlDeviceGetUUID");
    if (address == NULL || !nvs_driver_loaded())
        return NVS_NO_GPU;
    int (*const get_uuid)(nvs_nvml_device, char *, unsigned) =
        (int (*)(nvs_nvml_device, char *, unsigned))nvs_as_function(address);
    if (get_uuid(device, uuid, sizeof uuid) != NVS_NVML_SUCCESS)
        return NVS_NO_GPU;
    /* Fails at once where CUDA was not initialised. */
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && nvs_gpu_describe(gpu, facts) == NVS_OK; gpu++)
        if (strcasecmp(facts->uuid, uuid) == 0)
            return in_use(gpu) ? gpu : NVS_NO_GPU;
    return NVS_NO_GPU;
}

/* In: the real figures.  Out: those of the virtual card; false when there is none. */
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
    /* NVML's total is that of the whole card; CUDA's, which the ledger's figures stand beside, is without what the driver keeps. */
    const uint64_t usable = facts.total_bytes < *total_bytes ? facts.total_bytes : *total_bytes;
    uint64_t free_there = *free_bytes, total_there = usable;
    nvs_memory_virtual_info(gpu, &free_there, &total_there);
    if (total_there == usable && free_there == *free_bytes)
        return false;
    *free_bytes = free_there;
    *total_bytes = total_there;
    return true;
}

void nvs_nvml_show_memory(nvs_nvml_device device, nvs_nvml_memory *memory)
{
    int saved = errno;
    if (virtual_card(device, &memory->free, &memory->total))
        memory->used = memory->total - memory->free;
    errno = saved;
}

void nvs_nvml_show_memory_v2(nvs_nvml_device device, nvs_nvml_memory_v2 *memory)
{
    int saved = errno;
    if (memory->version != NVS_NVML_VERSIONED(nvs_nvml_memory_v2, 2)) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "nvmlDeviceGetMemoryInfo_v2 was asked for version %#x, which is not known here: it shows the real card",
                     memory->version);
    } else if (virtual_card(device, &memory->free, &memory->total)) {
        memory->reserved = 0;
        memory->used = memory->total - memory->free;
    }
    errno = saved;
}

/* The bytes that this process is charged with on the device; false where it is charged with none. */
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

/* Lists of all versions: entries of one size, each with its process id first and its memory 8 bytes further. */
static void show_processes(nvs_nvml_device device, unsigned count, char *list, size_t size)
{
    int saved = errno;
    const uint32_t self = (uint32_t)getpid();
    uint64_t bytes = 0;
    bool asked = false;
    for (unsigned i = 0; list != NULL && i < count; i++) {
        nvs_nvml_process_v1 *entry = (nvs_nvml_process_v1 *)(void *)(list + i * size);
        if (entry->process_id != self)
            continue;
        if (!asked && !charged(device, &bytes))
            break;
        asked = true;
        entry->used = bytes;
    }
    errno = saved;
}

_Static_assert(offsetof(nvs_nvml_process_v1, used) == offsetof(nvs_nvml_process, used), "show_processes");
_Static_assert(offsetof(nvs_nvml_process_v1, used) == offsetof(nvs_nvml_detail, used), "show_processes");

void nvs_nvml_show_processes_v1(nvs_nvml_device device, unsigned count, nvs_nvml_process_v1 *list)
{
    show_processes(device, count, (char *)list, sizeof *list);
}

void nvs_nvml_show_processes(nvs_nvml_device device, unsigned count, nvs_nvml_process *list)
{
    show_processes(device, count, (char *)list, sizeof *list);
}

void nvs_nvml_show_details(nvs_nvml_device device, nvs_nvml_detail_list *list)
{
    if (list->version == NVS_NVML_VERSIONED(nvs_nvml_detail_list, 1))
        show_processes(device, list->count, (char *)list->entries, sizeof *list->entries);
}
