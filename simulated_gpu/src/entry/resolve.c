/* cuGetProcAddress, the answers of what is not implemented, names of errors. */
#include "base/sim.h"

#include <stdlib.h>
#include <string.h>

typedef struct sim_entry { /* as unsupported.c declares it */
    const char *name, *symbol;
    int since, per_thread;
    int (*address)(void);
} sim_entry;
extern const sim_entry nvs_sim_entries[];
extern const uint32_t nvs_sim_entry_count;
int nvs_sim_unsupported(const char *function);

int nvs_sim_unsupported(const char *function)
{
    nvs_sim_thread.per_thread = false;
    if (atomic_load_explicit(&nvs_sim_faults_armed, memory_order_relaxed)) {
        CUresult injected = nvs_sim_fault(function);
        if (injected != CUDA_SUCCESS)
            return (int)injected;
    }
    return CUDA_ERROR_NOT_SUPPORTED;
}

/* The newest version that is not newer than asked for; with the flag its per-thread variant, if it has one. */
static CUresult look_up(const char *name, int version, cuuint64_t flags, void **out, CUdriverProcAddressQueryResult *status)
{
    const sim_entry *best = NULL;
    bool known = false, per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    for (uint32_t i = 0; i < nvs_sim_entry_count; i++) {
        const sim_entry *entry = &nvs_sim_entries[i];
        if (strcmp(entry->name, name) != 0 || nvs_sim_is_missing(entry->symbol))
            continue;
        known = true;
        if (entry->since > version || entry->since > nvs_sim_settings.driver_version || (entry->per_thread && !per_thread))
            continue;
        if (strcmp(entry->symbol, name) != 0 && (strcmp(entry->symbol, "cuMemHostAlloc_v2") == 0 || strcmp(entry->symbol, "cuMemcpy_v2") == 0))
            continue; /* exported under that name only */
        if (best == NULL || entry->since > best->since || (entry->since == best->since) ||
            (entry->per_thread && !best->per_thread && entry->since >= best->since))
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

/* "" asks whether the driver is a real one: it is. */
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
    return nvs_sim_return(resolve(symbol, pfn, cudaVersion, flags, &status));
}

SIM_EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                                CUdriverProcAddressQueryResult *symbolStatus)
{
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    NVS_SIM_ENTER_RAW();
    CUresult result = resolve(symbol, pfn, cudaVersion, flags, &status);
    if (symbolStatus != NULL && result != CUDA_ERROR_INVALID_VALUE) {
        *symbolStatus = status;
        result = CUDA_SUCCESS; /* the status says it; *pfn is NULL */
    }
    return nvs_sim_return(result);
}

SIM_EXPORT CUresult CUDAAPI cuGetErrorName(CUresult error, const char **pStr)
{
    if (pStr == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)error) {
#define NVS_SIM_ERROR(value, text) case value: *pStr = #value; return CUDA_SUCCESS;
#include "entry/errors.def"
#undef NVS_SIM_ERROR
    default: *pStr = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}

SIM_EXPORT CUresult CUDAAPI cuGetErrorString(CUresult error, const char **pStr)
{
    if (pStr == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    switch ((int)error) {
#define NVS_SIM_ERROR(value, text) case value: *pStr = text; return CUDA_SUCCESS;
#include "entry/errors.def"
#undef NVS_SIM_ERROR
    default: *pStr = NULL; return CUDA_ERROR_INVALID_VALUE;
    }
}
