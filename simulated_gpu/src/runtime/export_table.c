/* cuGetExportTable: the tables of functions that libcudart uses beside cuda.h.
 *
 * They are undocumented.  These tables have the functions that the runtime of CUDA 12 and 13 needs; all other slots return
 * NOT_SUPPORTED.  A table begins with its size in bytes, except the table for storage in contexts.
 */
#include "runtime/handshake.h"

#include <stdlib.h>
#include <string.h>

typedef void (*slot)(void); /* a function of any type */
typedef union cell {
    slot function;
    uintptr_t bytes;
} cell;

#define SLOTS 96u
#define FUNCTION(name) {.function = (slot)(name)}

#define HOLD_LOCK() NVS_SIM_HOLD_LOCK((pthread_mutex_lock(&nvs_sim_lock), CUDA_SUCCESS))

static CUresult not_supported(void) { return CUDA_ERROR_NOT_SUPPORTED; }
static CUresult no_effect(void) { return CUDA_SUCCESS; }

/* The runtime interface: modules of fat binaries, the primary context. */

static CUresult module_of(CUmodule *out, const void *wrapper) { return cuModuleLoadData(out, wrapper); }
static CUresult module_of_4(CUmodule *out, const void *wrapper, void *a, void *b, unsigned c) { return cuModuleLoadData(out, wrapper); }
static CUresult module_of_header(const void *header, CUmodule *out, void *a, void *b, unsigned c) { return cuModuleLoadData(out, header); }
static CUresult primary_context(CUcontext *out, CUdevice device) { return cuDevicePrimaryCtxRetain(out, device); }

/* Hooks of profilers: two arrays of switches, all off. */

static uint64_t switches[2048];
static void callbacks(void **out, size_t *count)
{
    *out = switches;
    *count = 1024;
}

static void few_callbacks(void **out, size_t *count)
{
    *out = switches;
    *count = 64;
}

/* Storage that the runtime attaches to a context under a key. */

static sim_storage **find_storage(sim_context *context, void *key)
{
    sim_storage **link = &context->storage;
    while (*link != NULL && (*link)->key != key)
        link = &(*link)->next;
    return link;
}

static CUresult storage_put(CUcontext handle, void *key, void *value, void (*destroy)(CUcontext, void *, void *))
{
    sim_context *context;
    HOLD_LOCK();
    NVS_SIM_TRY(nvs_sim_context(handle, &context));
    sim_storage **link = find_storage(context, key);
    if (*link == NULL && (*link = calloc(1, sizeof **link)) == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    (*link)->key = key;
    (*link)->value = value;
    (*link)->destroy = destroy;
    return CUDA_SUCCESS;
}

static CUresult storage_drop(CUcontext handle, void *key)
{
    sim_context *context;
    HOLD_LOCK();
    NVS_SIM_TRY(nvs_sim_context(handle, &context));
    sim_storage **link = find_storage(context, key), *dead = *link;
    if (dead != NULL)
        *link = dead->next;
    free(dead);
    return CUDA_SUCCESS;
}

static CUresult storage_get(void **value, CUcontext handle, void *key)
{
    sim_context *context;
    HOLD_LOCK();
    NVS_SIM_TRY(nvs_sim_context(handle, &context));
    sim_storage *found = *find_storage(context, key);
    NVS_SIM_CHECK(found != NULL, CUDA_ERROR_INVALID_HANDLE);
    *value = found->value;
    return CUDA_SUCCESS;
}

static CUresult context_check(CUcontext handle, uint32_t *state, const void **more)
{
    if (state != NULL)
        *state = 0;
    return CUDA_SUCCESS;
}

static CUresult check_validity(uint32_t version, uint64_t unix_seconds, uint8_t answer[16]);

static cell runtime_interface[SLOTS] = {[1] = FUNCTION(module_of),
                                        [2] = FUNCTION(primary_context),
                                        [6] = FUNCTION(module_of_4),
                                        [7] = FUNCTION(no_effect),
                                        [8] = FUNCTION(module_of_header),
                                        [12] = FUNCTION(no_effect)};
static cell profiler_hooks[SLOTS] = {[2] = FUNCTION(callbacks), [6] = FUNCTION(few_callbacks)};
static cell profiler_threads[SLOTS];
static cell context_storage[SLOTS] = {FUNCTION(storage_put), FUNCTION(storage_drop), FUNCTION(storage_get)};
static cell context_checks[SLOTS] = {[2] = FUNCTION(context_check), [3] = FUNCTION(no_effect)};
static cell validity[SLOTS] = {[1] = FUNCTION(check_validity)};
static cell newer_runtime[SLOTS];

static const struct {
    uint8_t id[16];
    cell *table;
    unsigned slots; /* 0: the table does not begin with its size */
} tables[] = {
    {{0x6b, 0xd5, 0xfb, 0x6c, 0x5b, 0xf4, 0xe7, 0x4a, 0x89, 0x87, 0xd9, 0x39, 0x12, 0xfd, 0x9d, 0xf9}, runtime_interface, 13},
    {{0xa0, 0x94, 0x79, 0x8c, 0x2e, 0x74, 0x2e, 0x74, 0x93, 0xf2, 0x08, 0x00, 0x20, 0x0c, 0x0a, 0x66}, profiler_hooks, 7},
    {{0x42, 0xd8, 0x5a, 0x81, 0x23, 0xf6, 0xcb, 0x47, 0x82, 0x98, 0xf6, 0xe7, 0x8a, 0x3a, 0xec, 0xdc}, profiler_threads, 4},
    {{0xc6, 0x93, 0x33, 0x6e, 0x11, 0x21, 0xdf, 0x11, 0xa8, 0xc3, 0x68, 0xf3, 0x55, 0xd8, 0x95, 0x93}, context_storage, 0},
    {{0x26, 0x3e, 0x88, 0x60, 0x7c, 0xd2, 0x61, 0x43, 0x92, 0xf6, 0xbb, 0xd5, 0x00, 0x6d, 0xfa, 0x7e}, context_checks, 4},
    {{0xd4, 0x08, 0x20, 0x55, 0xbd, 0xe6, 0x70, 0x4b, 0x8d, 0x34, 0xba, 0x12, 0x3c, 0x66, 0xe1, 0xf2}, validity, 3},
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2}, newer_runtime, 96},
};

static CUresult check_validity(uint32_t version, uint64_t unix_seconds, uint8_t answer[16])
{
#ifdef NVS_SIM_RUNTIME
    const void *function;
    memcpy(&function, &validity[1].function, sizeof function);
    HOLD_LOCK();
    nvs_sim_handshake(version, unix_seconds, runtime_interface, validity, function, answer);
    return CUDA_SUCCESS;
#else
    return CUDA_ERROR_NOT_SUPPORTED;
#endif
}

static void fill_tables(void)
{
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++) {
        for (unsigned i = 0; i < SLOTS; i++)
            if (tables[t].table[i].bytes == 0)
                tables[t].table[i].function = (slot)not_supported;
        if (tables[t].slots != 0)
            tables[t].table[0].bytes = tables[t].slots * sizeof(cell);
    }
}

SIM_EXPORT CUresult CUDAAPI cuGetExportTable(const void **ppExportTable, const CUuuid *pExportTableId)
{
    static pthread_once_t filled = PTHREAD_ONCE_INIT;
    NVS_SIM_ENTER_RAW();
    pthread_once(&filled, fill_tables);
    NVS_SIM_CHECK(ppExportTable != NULL && pExportTableId != NULL, CUDA_ERROR_INVALID_VALUE);
    *ppExportTable = NULL;
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        if (memcmp(tables[t].id, pExportTableId->bytes, sizeof tables[t].id) == 0) {
            *ppExportTable = tables[t].table;
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}
