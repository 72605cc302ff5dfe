/* The table in memory: names, wrappers and real pointers.  No locks, no allocation; see cuda_api.h. */
#include "driver/cuda_api.h"

#include "base/log.h"
#include "driver/library.h"

#include <string.h>

const nvs_entry nvs_entries[NVS_ID_COUNT] = {
#define NVS_STREAM(symbol, since, parameters, arguments, stream) NVS_CUSTOM(symbol, since)
#define NVS_CURRENT(symbol, since, parameters, arguments) NVS_CUSTOM(symbol, since)
#define NVS_CUSTOM(symbol, since) [NVS_ID_##symbol] = {#symbol, (nvs_function)symbol, since, false},
#define NVS_PASS(symbol, since, reason) [NVS_ID_##symbol] = {#symbol, NULL, since, false},
#define NVS_THUNK(symbol, since, reason) [NVS_ID_##symbol] = {#symbol, NULL, since, true},
#define NVS_FOREIGN(symbol, since, reason) NVS_PASS(symbol, since, reason)
#include "driver/cuda_api.def"
};

_Atomic(nvs_function) nvs_reals[NVS_ID_COUNT];

/* Replaces each function that the driver lacks; both ABIs let a callee ignore its arguments. */
static CUresult CUDAAPI nvs_missing(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

nvs_function nvs_real_resolve(nvs_id id)
{
    nvs_function real = nvs_as_function(nvs_driver_symbol(nvs_entries[id].name));
    if (real == NULL) {
        /* Not stored while no driver is loaded: one may be loaded later. */
        if (!nvs_driver_loaded())
            return (nvs_function)nvs_missing;
        real = (nvs_function)nvs_missing;
    }
    nvs_function none = NULL;
    /* Pairs with the acquire load in nvs_real.  Keeps an earlier value: a pointer from cuGetProcAddress. */
    if (!atomic_compare_exchange_strong_explicit(nvs_real_at(id), &none, real, memory_order_release, memory_order_acquire))
        real = none;
    return real;
}

void nvs_reals_resolve(void)
{
    for (unsigned id = 0; id < NVS_ID_COUNT; id++)
        (void)nvs_real((nvs_id)id);
}

bool nvs_real_exists(nvs_id id)
{
    return nvs_real(id) != (nvs_function)nvs_missing;
}

/* The first row that is not before `name`. */
static unsigned lower_bound(const char *name)
{
    unsigned low = 0, high = NVS_ID_COUNT;
    while (low < high) {
        const unsigned middle = low + (high - low) / 2;
        if (strcmp(nvs_entries[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

nvs_id nvs_id_of_name(const char *name)
{
    const unsigned id = lower_bound(name);
    return id < NVS_ID_COUNT && strcmp(nvs_entries[id].name, name) == 0 ? (nvs_id)id : NVS_ID_COUNT;
}

static bool is_per_thread(const char *name)
{
    const size_t length = strlen(name);
    return length > 5 && strncmp(name + length - 5, "_pt", 3) == 0;
}

/* "", "_v2", "_ptsz", "_v3_ptds": the suffixes of a family's name. */
static bool is_variant_suffix(const char *suffix)
{
    if (suffix[0] == '_' && suffix[1] == 'v' && suffix[2] >= '1' && suffix[2] <= '9') {
        suffix += 3;
        while (*suffix >= '0' && *suffix <= '9')
            suffix++;
    }
    return *suffix == '\0' || strcmp(suffix, "_ptsz") == 0 || strcmp(suffix, "_ptds") == 0;
}

void *nvs_translate_symbol(nvs_id id, const char *name, void *address)
{
    if (id == NVS_ID_COUNT)
        return nvs_name_submits(name) ? nvs_thunk_for(name, address) : address;
    const nvs_entry *entry = &nvs_entries[id];
    if (entry->thunk)
        return nvs_thunk_for(name, address);
    return entry->wrapper != NULL ? nvs_as_address(entry->wrapper) : address;
}

/* The row that the driver must mean: the newest signature up to `version`, the per-thread one if requested and present. */
static nvs_id by_version(const char *name, int version, bool per_thread)
{
    const size_t length = strlen(name);
    nvs_id best = NVS_ID_COUNT;
    bool best_per_thread = false;
    for (unsigned id = lower_bound(name); id < NVS_ID_COUNT; id++) {
        const nvs_entry *entry = &nvs_entries[id];
        if (strncmp(entry->name, name, length) != 0)
            break;
        if (!is_variant_suffix(entry->name + length) || (int64_t)entry->since > version)
            continue;
        const bool variant = is_per_thread(entry->name);
        if (variant && !per_thread)
            continue;
        if (best == NVS_ID_COUNT || (variant && !best_per_thread) ||
            (variant == best_per_thread && entry->since >= nvs_entries[best].since)) {
            best = (nvs_id)id;
            best_per_thread = variant;
        }
    }
    return best;
}

void *nvs_translate(const char *name, void *address, int version, uint64_t flags)
{
    const bool per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    const size_t length = strlen(name);
    nvs_id found = NVS_ID_COUNT;
    bool family = false;
    /* The address decides; if variants share one, the requested variant. */
    for (unsigned id = lower_bound(name); id < NVS_ID_COUNT; id++) {
        const nvs_entry *entry = &nvs_entries[id];
        if (strncmp(entry->name, name, length) != 0)
            break;
        if (!is_variant_suffix(entry->name + length))
            continue;
        family = true;
        if (entry->wrapper != NULL && nvs_as_address(entry->wrapper) == address)
            return address; /* the driver's own references bind to the hook */
        if (nvs_as_address(nvs_real((nvs_id)id)) != address)
            continue;
        if (found == NVS_ID_COUNT || (nvs_entries[found].thunk && !entry->thunk) ||
            is_per_thread(entry->name) == per_thread)
            found = (nvs_id)id;
    }
    if (found != NVS_ID_COUNT)
        return nvs_translate_symbol(found, nvs_entries[found].name, address);
    if (!family)
        return nvs_translate_symbol(NVS_ID_COUNT, name, address);

    /* A driver may answer with an address that it does not export.  Then version and flags select the row, whose
     * exported function is equivalent. */
    found = by_version(name, version, per_thread);
    if (found == NVS_ID_COUNT || !nvs_is_gated(&nvs_entries[found]))
        return address;
    if (!nvs_real_exists(found)) /* pairs with the acquire load in nvs_real */
        atomic_store_explicit(nvs_real_at(found), nvs_as_function(address), memory_order_release);
    return nvs_translate_symbol(found, nvs_entries[found].name, address);
}

static bool contains_any(const char *name, const char *const *words)
{
    for (; *words != NULL; words++)
        if (strstr(name, *words) != NULL)
            return true;
    return false;
}

bool nvs_name_submits(const char *name)
{
    static const char *const work[] = {"Launch",     "Memcpy",    "Memset",     "Prefetch",  "CpyBatch", "Discard",
                                       "BatchMemOp", "WaitValue", "WriteValue", "Decompress", NULL};
    static const char *const other[] = {"Get", "SetParam", "Node", NULL};
    return contains_any(name, work) && !contains_any(name, other);
}
