/* Entry points: the begin and end of a public function, the variants for the per-thread default stream, cuGetProcAddress, and the names
 * of errors.
 *
 * The hook's table (client_hook/src/driver/cuda_api.def) is the only list of entry points.  unsupported.c makes a weak body of each row,
 * which an implementation in another file replaces; cuGetProcAddress answers from the same rows.
 */
#include "base/entry.h"
#include "base/entry_table.h"

#include <string.h>

_Thread_local sim_thread nvs_sim_thread;
bool nvs_sim_initialised, nvs_sim_forked, nvs_sim_ended, nvs_sim_locked, nvs_sim_failed;
uint32_t nvs_sim_calls;

static CUresult count_call(void)
{
    nvs_sim_calls += nvs_sim_thread.depth++ == 0;
    return CUDA_SUCCESS;
}

/* A call inside a call belongs to work that the lock waits for. */
static void wait_while_locked(void)
{
    while (nvs_sim_locked && nvs_sim_thread.depth == 0 && !nvs_sim_forked && !nvs_sim_ended)
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

CUresult nvs_sim_hold(void)
{
    pthread_mutex_lock(&nvs_sim_lock);
    wait_while_locked();
    return count_call();
}

CUresult nvs_sim_enter(const char *function, bool need_init)
{
    nvs_sim_thread.per_thread = nvs_sim_thread.next_per_thread;
    nvs_sim_thread.next_per_thread = false;
    nvs_sim_observe_call(function);
    CUresult injected = nvs_sim_fault(function);
    if (injected != CUDA_SUCCESS)
        return injected;
    if (nvs_sim_thread.in_callback)
        return CUDA_ERROR_NOT_PERMITTED;
    pthread_mutex_lock(&nvs_sim_lock);
    if (need_init)
        wait_while_locked();
    CUresult result = CUDA_SUCCESS;
    if (nvs_sim_ended)
        result = CUDA_ERROR_DEINITIALIZED;
    else if (need_init && (!nvs_sim_initialised || nvs_sim_forked))
        result = CUDA_ERROR_NOT_INITIALIZED;
    else if (need_init && nvs_sim_failed)
        result = CUDA_ERROR_UNKNOWN;
    if (result == CUDA_SUCCESS)
        return count_call();
    pthread_mutex_unlock(&nvs_sim_lock);
    return result;
}

/* Each variant marks the thread, then calls the plain function. */
#define NVS_SIM_PER_THREAD(symbol, plain, parameters, arguments)                                \
    SIM_EXPORT CUresult CUDAAPI symbol parameters                                               \
    {                                                                                           \
        nvs_sim_thread.next_per_thread = true;                                                  \
        return plain arguments;                                                                 \
    }
#include "base/per_thread.def"

/* True if the symbol is a version (_v2) or variant (_ptsz, _ptds: per-thread default stream) of the name. */
static bool is_named(const char *symbol, const char *name, bool *per_thread)
{
    const size_t name_length = strlen(name);
    size_t length = strlen(symbol);
    if (strncmp(symbol, name, name_length) != 0)
        return false;
    *per_thread = length > 5 && (strcmp(symbol + length - 5, "_ptsz") == 0 || strcmp(symbol + length - 5, "_ptds") == 0);
    length -= *per_thread ? 5 : 0;
    if (length > 3 && symbol[length - 3] == '_' && symbol[length - 2] == 'v')
        length -= 3;
    return length == name_length;
}

/* The newest version that is not newer than `version`; with the flag its per-thread variant, if there is one. */
static CUresult look_up(const char *name, int version, cuuint64_t flags, void **out, CUdriverProcAddressQueryResult *status)
{
    const sim_entry *best = NULL;
    bool known = false, wanted = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, per_thread;
    for (uint32_t i = 0; i < nvs_sim_entry_count; i++) { /* versions of a name are in ascending order, each before its variant */
        const sim_entry *entry = &nvs_sim_entries[i];
        if (!is_named(entry->symbol, name, &per_thread))
            continue;
        known = true;
        if (entry->since > version || entry->since > nvs_sim_settings.driver_version || (per_thread && !wanted))
            continue;
        if (strcmp(entry->symbol, name) != 0 && (strcmp(entry->symbol, "cuMemHostAlloc_v2") == 0 || strcmp(entry->symbol, "cuMemcpy_v2") == 0))
            continue; /* found only by its full name */
        if (best == NULL || entry->since >= best->since)
            best = entry;
    }
    *out = NULL;
    if (best != NULL) {
        memcpy(out, &best->address, sizeof *out); /* ISO C has no cast between these */
        *status = CU_GET_PROC_ADDRESS_SUCCESS;
        return CUDA_SUCCESS;
    }
    *status = known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult resolve(const char *symbol, void **pfn, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *status)
{
    const cuuint64_t both = CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    if (symbol == NULL || pfn == NULL || (flags & ~both) != 0 || (flags & both) == both)
        return CUDA_ERROR_INVALID_VALUE;
    return look_up(symbol, version, flags, pfn, status);
}

SIM_EXPORT CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
    CUdriverProcAddressQueryResult status;
    NVS_SIM_ENTER_RAW();
    return resolve(symbol, pfn, cudaVersion, flags, &status);
}

SIM_EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                                CUdriverProcAddressQueryResult *symbolStatus)
{
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    NVS_SIM_ENTER_RAW();
    CUresult result = resolve(symbol, pfn, cudaVersion, flags, &status);
    if (symbolStatus != NULL && result != CUDA_ERROR_INVALID_VALUE) {
        *symbolStatus = status;
        result = CUDA_SUCCESS; /* the status has the reason; *pfn is NULL */
    }
    return result;
}

#define ERROR_TEXT(function, text_of)                                                           \
    SIM_EXPORT CUresult CUDAAPI function(CUresult error, const char **pStr)                     \
    {                                                                                           \
        if (pStr == NULL)                                                                       \
            return CUDA_ERROR_INVALID_VALUE;                                                    \
        *pStr = NULL;                                                                           \
        for (size_t i = 0; i < sizeof errors / sizeof *errors && *pStr == NULL; i++)            \
            if (errors[i].value == error)                                                       \
                *pStr = errors[i].text_of;                                                      \
        return *pStr != NULL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;                         \
    }

static const struct {
    CUresult value;
    const char *name, *text;
} errors[] = {
#define NVS_SIM_ERROR(value, text) {value, #value, text},
#include "base/errors.def"
#undef NVS_SIM_ERROR
};

ERROR_TEXT(cuGetErrorName, name)
ERROR_TEXT(cuGetErrorString, text)
