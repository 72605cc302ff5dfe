/* A libcuda.so.1 that does nothing but say which of its functions was reached, with which arguments.
 *
 * One function for every row of cuda_api.def, whatever CUDA it is of, and some that no table knows.  It is not compiled
 * against cuda.h: every function here has the same shape.  The environment says how many GPUs it has: INTERCEPT_GPUS; and
 * of which CUDA it is: INTERCEPT_VERSION.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#undef CUDA_VERSION
#define CUDA_VERSION 99990 /* all rows */
#define EXPORT __attribute__((visibility("default")))

typedef uintptr_t word;
typedef void function(void);
#define WORDS \
    word a0, word a1, word a2, word a3, word a4, word a5, word a6, word a7, word a8, word a9, word a10, word a11, word a12, word a13
#define PASSED {a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13}

EXPORT const char *intercept_name; /* the function reached last */
EXPORT word intercept_arguments[14];
EXPORT int intercept_result;  /* what they return */
EXPORT int intercept_current; /* GPU of the "current context" */
static int below;             /* of the one that comes back when it is popped */
EXPORT int intercept_shift;   /* added to the GPU of every stream: its handle now belongs to another */

/* Functions that must answer, beside saying that they were reached. */
static void answer(const char *name, const word *a)
{
    if (strcmp(name, "cuDeviceGetCount") == 0 && a[0] != 0) {
        const char *gpus = getenv("INTERCEPT_GPUS");
        *(int *)a[0] = gpus != NULL ? atoi(gpus) : 1;
    } else if (strcmp(name, "cuCtxGetDevice") == 0 && a[0] != 0) {
        *(int *)a[0] = intercept_current;
    } else if (strcmp(name, "cuStreamGetCtx") == 0 && a[1] != 0) {
        *(word *)a[1] = 0x100 + (((a[0] >> 12) + (word)intercept_shift) & 7); /* stream 0x3000 is of GPU 3 */
    } else if (strcmp(name, "cuCtxPushCurrent_v2") == 0) {
        below = intercept_current;
        intercept_current = (int)(a[0] & 7);
    } else if (strcmp(name, "cuCtxPopCurrent_v2") == 0) {
        intercept_current = below;
    } else if (strcmp(name, "cuCtxGetCurrent") == 0 && a[0] != 0) {
        *(word *)a[0] = 0x100 + (word)intercept_current;
    } else if (strcmp(name, "cuDevicePrimaryCtxRetain") == 0 && a[0] != 0) {
        *(word *)a[0] = 0x100 + a[1];
    }
}

static int reach(const char *name, const word *arguments)
{
    static const char *const silent[] = {"cuDeviceGetCount", "cuCtxGetDevice", "cuStreamGetCtx", "cuCtxGetCurrent", NULL};
    answer(name, arguments);
    for (unsigned i = 0; silent[i] != NULL; i++)
        if (strcmp(silent[i], name) == 0)
            return 0;
    intercept_name = name;
    memcpy(intercept_arguments, arguments, sizeof intercept_arguments);
    return intercept_result;
}

#define REACHED(symbol)                        \
    EXPORT int symbol(WORDS)                   \
    {                                          \
        const word passed[] = PASSED;          \
        return reach(#symbol, passed);         \
    }
#define NVS_STREAM(symbol, since, parameters, arguments, stream) REACHED(symbol)
#define NVS_CURRENT(symbol, since, parameters, arguments) REACHED(symbol)
#define NVS_CUSTOM(symbol, since) REACHED(symbol)
#define NVS_PASS(symbol, since, reason) REACHED(symbol)
#define NVS_THUNK(symbol, since, reason) REACHED(symbol)
#define NVS_FOREIGN(symbol, since, reason) REACHED(symbol)
#define cuGetProcAddress intercept_unused_1 /* these two have bodies below */
#define cuGetProcAddress_v2 intercept_unused_2
#include "driver/cuda_api.def"
#undef cuGetProcAddress
#undef cuGetProcAddress_v2
REACHED(cuLaunchNextGeneration)
REACHED(cuMemcpyNextGenerationAsync)
REACHED(cuNextGenerationGetState)

/* Of a signature that nobody can guess: vectors in registers, and more of everything than registers take. */
EXPORT double cuLaunchNextVectors(double d0, word a0, double d1, word a1, double d2, word a2, double d3, word a3, double d4, word a4,
                                  double d5, word a5, double d6, word a6, double d7, word a7, double d8, word a8);
double cuLaunchNextVectors(double d0, word a0, double d1, word a1, double d2, word a2, double d3, word a3, double d4, word a4,
                           double d5, word a5, double d6, word a6, double d7, word a7, double d8, word a8)
{
    const word passed[] = {a0, a1, a2, a3, a4, a5, a6, a7, a8, 0, 0, 0, 0, 0};
    reach("cuLaunchNextVectors", passed);
    return d0 + 2 * d1 + 4 * d2 + 8 * d3 + 16 * d4 + 32 * d5 + 64 * d6 + 128 * d7 + 256 * d8;
}
EXPORT int cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags);
EXPORT int cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status);

static const struct {
    const char *name;
    int since;
    function *address;
} rows[] = {
#define ROW(symbol, since) {#symbol, since, (function *)symbol},
#define NVS_STREAM(symbol, since, parameters, arguments, stream) ROW(symbol, since)
#define NVS_CURRENT(symbol, since, parameters, arguments) ROW(symbol, since)
#define NVS_CUSTOM(symbol, since) ROW(symbol, since)
#define NVS_PASS(symbol, since, reason) ROW(symbol, since)
#define NVS_THUNK(symbol, since, reason) ROW(symbol, since)
#define NVS_FOREIGN(symbol, since, reason) ROW(symbol, since)
#include "driver/cuda_api.def"
    ROW(cuLaunchNextGeneration, 14000)
    ROW(cuMemcpyNextGenerationAsync, 14000)
    ROW(cuNextGenerationGetState, 14000)
    ROW(cuLaunchNextVectors, 14000)
};

/* The newest signature that is not newer than asked for, per-thread if that is asked for and there. */
int cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *status)
{
    const size_t length = strlen(symbol);
    const char *limit = getenv("INTERCEPT_VERSION");
    int best = -1;
    if (limit != NULL && atoi(limit) < version)
        version = atoi(limit);
    *out = NULL;
    if (status != NULL)
        *status = 1;
    for (unsigned i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const char *suffix = rows[i].name + length;
        if (strncmp(rows[i].name, symbol, length) != 0 || rows[i].since > version)
            continue;
        if (suffix[0] == '_' && suffix[1] == 'v')
            suffix += 3;
        const int per_thread = strcmp(suffix, "_ptsz") == 0 || strcmp(suffix, "_ptds") == 0;
        if ((*suffix != 0 && !per_thread) || (per_thread && (flags & 2) == 0))
            continue;
        if (best < 0 || rows[i].since >= rows[best].since || per_thread)
            best = (int)i;
    }
    if (best < 0)
        return 500; /* CUDA_ERROR_NOT_FOUND */
    memcpy(out, &rows[best].address, sizeof *out);
    if (status != NULL)
        *status = 0;
    return 0;
}

int cuGetProcAddress(const char *symbol, void **out, int version, uint64_t flags)
{
    return cuGetProcAddress_v2(symbol, out, version, flags, NULL);
}

/* The address of a function of this driver, for those who must not ask dlsym. */
EXPORT void *intercept_address(const char *name)
{
    void *address = NULL;
    for (unsigned i = 0; i < sizeof rows / sizeof rows[0]; i++)
        if (strcmp(rows[i].name, name) == 0)
            memcpy(&address, &rows[i].address, sizeof address);
    return address;
}
