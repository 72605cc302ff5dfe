/* The undocumented interface between libcudart and the driver: tables of functions (cuGetExportTable), and a validity check.
 *
 * The tables have the functions that the runtime of CUDA 12 and 13 needs; all other slots return NOT_SUPPORTED.  A table begins with its
 * size in bytes, except the table for storage in contexts.
 */
#include "stream/stream.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef void (*slot)(void); /* a function of any type */
typedef union cell {
    slot function;
    uintptr_t bytes;
} cell;

#define SLOTS 96u
#define FUNCTION(name) {.function = (slot)(name)}

#define HOLD_LOCK() NVS_SIM_HOLD_LOCK(nvs_sim_hold())

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

/* Calls `visit` with each function of a module; their number. */
static uint64_t each_function(CUcontext handle, CUmodule module, void (*visit)(void *, CUfunction, CUmodule), void *argument)
{
    unsigned count;
    if (cuModuleGetFunctionCount(&count, module) != CUDA_SUCCESS)
        return 0;
    CUfunction *functions = calloc(count, sizeof *functions);
    if (functions == NULL || cuModuleEnumerateFunctions(functions, count, module) != CUDA_SUCCESS)
        count = 0;
    for (unsigned i = 0; i < count; i++)
        visit(argument, functions[i], module);
    free(functions);
    return count;
}

static CUresult check_validity(uint32_t version, uint64_t unix_seconds, uint8_t answer[16]);

static cell runtime_interface[SLOTS] = {[1] = FUNCTION(module_of),
                                        [2] = FUNCTION(primary_context),
                                        [6] = FUNCTION(module_of_4),
                                        [7] = FUNCTION(no_effect),
                                        [8] = FUNCTION(module_of_header),
                                        [12] = FUNCTION(no_effect)};
static cell profiler_hooks[SLOTS] = {[2] = FUNCTION(callbacks), [6] = FUNCTION(few_callbacks)};
static cell profiler_threads[SLOTS] = {[2] = FUNCTION(cuCtxGetCurrent)};
static cell context_storage[SLOTS] = {FUNCTION(storage_put), FUNCTION(storage_drop), FUNCTION(storage_get)};
static cell context_checks[SLOTS] = {[2] = FUNCTION(context_check), [3] = FUNCTION(no_effect)};
static cell validity[SLOTS] = {[1] = FUNCTION(check_validity)};
static cell context_identity[SLOTS] = {[4] = FUNCTION(cuCtxGetId)};
static cell module_functions[SLOTS] = {[7] = FUNCTION(each_function)};
static cell of_products[SLOTS]; /* cublasLt asks for it, and is content when nothing in it is supported */

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
    {{0x21, 0x31, 0x8c, 0x60, 0x97, 0x14, 0x32, 0x48, 0x8c, 0xa6, 0x41, 0xff, 0x73, 0x24, 0xc8, 0xf2}, context_identity, 96},
    {{0x6e, 0x16, 0x3f, 0xbe, 0xb9, 0x58, 0x44, 0x4d, 0x83, 0x5c, 0xe1, 0x82, 0xaf, 0xf1, 0x99, 0x1e}, module_functions, 96},
    {{0x17, 0x34, 0xdc, 0x26, 0x80, 0x0d, 0x47, 0x45, 0x87, 0x26, 0xc0, 0xf1, 0xe7, 0xdd, 0x8b, 0xca}, of_products, 96},
};

/* The validity check of libcudart: an HMAC-MD2 (RFC 2104, RFC 1319) with a fixed key over the process, the time, and the devices.
 * Without the right answer every runtime call fails with cudaErrorSoftwareValidityNotEstablished.
 * The key and the layout of the message are public knowledge.
 */
#ifdef NVS_SIM_RUNTIME
#define BLOCK 16u

/* MD2's substitution: RFC 1319, a permutation of 0..255 made from the digits of pi. */
static const uint8_t substitution[256] = {
    41, 46, 67, 201, 162, 216, 124, 1, 61, 54, 84, 161, 236, 240, 6, 19, 98, 167, 5, 243, 192, 199, 115, 140, 152, 147, 43, 217,
    188, 76, 130, 202, 30, 155, 87, 60, 253, 212, 224, 22, 103, 66, 111, 24, 138, 23, 229, 18, 190, 78, 196, 214, 218, 158, 222,
    73, 160, 251, 245, 142, 187, 47, 238, 122, 169, 104, 121, 145, 21, 178, 7, 63, 148, 194, 16, 137, 11, 34, 95, 33, 128, 127,
    93, 154, 90, 144, 50, 39, 53, 62, 204, 231, 191, 247, 151, 3, 255, 25, 48, 179, 72, 165, 181, 209, 215, 94, 146, 42, 172, 86,
    170, 198, 79, 184, 56, 210, 150, 164, 125, 182, 118, 252, 107, 226, 156, 116, 4, 241, 69, 157, 112, 89, 100, 113, 135, 32,
    134, 91, 207, 101, 230, 45, 168, 2, 27, 96, 37, 173, 174, 176, 185, 246, 28, 70, 97, 105, 52, 64, 126, 15, 85, 71, 163, 35,
    221, 81, 175, 58, 195, 92, 249, 206, 186, 197, 234, 38, 44, 83, 13, 110, 133, 40, 132, 9, 211, 223, 205, 244, 65, 129, 77,
    82, 106, 220, 55, 200, 108, 193, 171, 250, 36, 225, 123, 8, 12, 189, 177, 74, 120, 136, 149, 139, 227, 99, 232, 109, 233,
    203, 213, 254, 59, 0, 29, 57, 242, 239, 183, 14, 102, 88, 208, 228, 166, 119, 114, 248, 235, 117, 75, 10, 49, 68, 80, 180,
    143, 237, 31, 26, 219, 153, 141, 51, 159, 17, 131, 20,
};

typedef struct md2 {
    uint8_t state[BLOCK], checksum[BLOCK], pending[BLOCK];
    unsigned length;
} md2;

static void absorb_block(md2 *hash, const uint8_t block[BLOCK])
{
    uint8_t work[3 * BLOCK], carry = 0;
    for (unsigned i = 0; i < BLOCK; i++) {
        work[i] = hash->state[i];
        work[BLOCK + i] = block[i];
        work[2 * BLOCK + i] = hash->state[i] ^ block[i];
    }
    for (unsigned round = 0; round < 18; round++) {
        for (unsigned i = 0; i < sizeof work; i++)
            carry = work[i] ^= substitution[carry];
        carry = (uint8_t)(carry + round);
    }
    memcpy(hash->state, work, BLOCK);
}

static void md2_update(md2 *hash, const void *data, size_t bytes)
{
    const uint8_t *from = data;
    while (bytes-- != 0) {
        hash->pending[hash->length++] = *from++;
        if (hash->length != BLOCK)
            continue;
        uint8_t last = hash->checksum[BLOCK - 1];
        for (unsigned i = 0; i < BLOCK; i++)
            last = hash->checksum[i] ^= substitution[hash->pending[i] ^ last];
        absorb_block(hash, hash->pending);
        hash->length = 0;
    }
}

static void md2_finish(md2 *hash, uint8_t digest[BLOCK])
{
    uint8_t padding[BLOCK], checksum[BLOCK];
    unsigned missing = BLOCK - hash->length;
    memset(padding, (int)missing, sizeof padding);
    md2_update(hash, padding, missing);
    memcpy(checksum, hash->checksum, sizeof checksum);
    absorb_block(hash, checksum);
    memcpy(digest, hash->state, BLOCK);
}

static void md2_begin(md2 *hash, uint8_t pad)
{
    static const uint8_t key[BLOCK] = {0x14, 0x6a, 0xdd, 0xae, 0x53, 0xa9, 0xa7, 0x52,
                                       0xaa, 0x08, 0x41, 0x36, 0x0b, 0xf5, 0x5a, 0x9f};
    uint8_t block[BLOCK];
    memset(hash, 0, sizeof *hash);
    for (unsigned i = 0; i < BLOCK; i++)
        block[i] = key[i] ^ pad;
    md2_update(hash, block, sizeof block);
}

static CUresult check_validity(uint32_t version, uint64_t unix_seconds, uint8_t answer[16])
{
    static const uint8_t fixed[BLOCK] = {0x5c, 0x67, 0xcb, 0x03, 0x1c, 0x18, 0x41, 0x33,
                                         0xe8, 0xd1, 0x4c, 0x1f, 0xaa, 0x83, 0xd3, 0x8e};
    HOLD_LOCK();
    const struct {
        uint32_t driver_version, version, process_id, thread;
        const cell *runtime_table, *check_table;
        cell check_function;
        uint64_t unix_seconds;
    } message = {(uint32_t)nvs_sim_settings.driver_version, version, (uint32_t)getpid(), (uint32_t)pthread_self(), runtime_interface,
                 validity, validity[1], unix_seconds};
    uint8_t inner[BLOCK];
    md2 hash;
    if (version % 10 < 2) { /* these two versions have constant answers */
        memcpy(answer, fixed, BLOCK);
        answer[7] = version % 10 == 0 ? 0x33 : 0x18;
        return CUDA_SUCCESS;
    }
    md2_begin(&hash, 0x36);
    md2_update(&hash, &message, sizeof message);
    for (int i = 0; i < nvs_sim_device_count; i++) {
        struct {
            uint8_t uuid[16];
            int32_t domain, bus, device;
        } card = {.bus = (int32_t)nvs_sim_shared_state->gpus[nvs_sim_devices[i].gpu].card + 1};
        memcpy(card.uuid, nvs_sim_devices[i].uuid, sizeof card.uuid);
        md2_update(&hash, &card, sizeof card);
    }
    md2_finish(&hash, inner);
    md2_begin(&hash, 0x5c);
    md2_update(&hash, inner, sizeof inner);
    md2_finish(&hash, answer);
    return CUDA_SUCCESS;
}
#else
static CUresult check_validity(uint32_t version, uint64_t unix_seconds, uint8_t answer[16]) { return CUDA_ERROR_NOT_SUPPORTED; }
#endif

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
