/* Expansions of cuda_api.def: ids, names, wrappers, real pointers, lookup.  The table itself is the only list of functions.
 *
 * Everything here works before cuInit, on any thread, without locks or allocation: a real pointer is resolved on first
 * use, perhaps by several threads, which all store the same value, and at the latest when the agent starts.
 */
#ifndef NVS_CUDA_API_H
#define NVS_CUDA_API_H

#include "base/hot.h"

#include <stdatomic.h>

typedef enum nvs_id {
#define NVS_STREAM(symbol, since, parameters, arguments, stream) NVS_ID_##symbol,
#define NVS_CURRENT(symbol, since, parameters, arguments) NVS_ID_##symbol,
#define NVS_CUSTOM(symbol, since) NVS_ID_##symbol,
#define NVS_PASS(symbol, since, reason) NVS_ID_##symbol,
#define NVS_THUNK(symbol, since, reason) NVS_ID_##symbol,
#define NVS_FOREIGN(symbol, since, reason) NVS_ID_##symbol,
#include "driver/cuda_api.def"
    NVS_ID_COUNT
} nvs_id;

typedef struct nvs_entry {
    const char *name;
    nvs_function wrapper; /* NULL: the application gets the driver's own function, or a thunk in front of it */
    uint32_t since;       /* the CUDA_VERSION that introduced this signature */
    bool thunk;           /* gated without knowing the signature */
} nvs_entry;

static inline bool nvs_is_gated(const nvs_entry *entry)
{
    return entry->wrapper != NULL || entry->thunk;
}

extern const nvs_entry nvs_entries[NVS_ID_COUNT] __attribute__((visibility("hidden")));
extern _Atomic(nvs_function) nvs_reals[NVS_ID_COUNT] __attribute__((visibility("hidden"))); /* all but the hottest: see nvs_real_at */

nvs_function nvs_real_resolve(nvs_id id);

/* Resolves every row, before a thread of the hook is made: dlsym takes the loader's lock, and an application's thread waits at a gate with that lock
 * in a library's constructor. */
void nvs_reals_resolve(void);

/* The place of the pointer to the real function; NULL in it: not resolved yet. */
static inline _Atomic(nvs_function) *nvs_real_at(nvs_id id)
{
    _Static_assert(NVS_ID_cuLaunchKernel_ptsz - NVS_ID_cuLaunchKernel == NVS_HOT_REALS - 1, "launches of kernels stand together in the table");
    return id >= NVS_ID_cuLaunchKernel && id <= NVS_ID_cuLaunchKernel_ptsz ? &nvs_hot.reals[id - NVS_ID_cuLaunchKernel] : &nvs_reals[id];
}

/* NULL: not resolved yet. */
static inline __attribute__((always_inline)) nvs_function nvs_real_known(nvs_id id)
{
    /* Pairs with the release store in nvs_real_resolve; every store there is of the same value. */
    return atomic_load_explicit(nvs_real_at(id), memory_order_acquire);
}

/* Never NULL: a function that the driver lacks is replaced by one that returns CUDA_ERROR_NOT_SUPPORTED. */
static inline nvs_function nvs_real(nvs_id id)
{
    nvs_function real = nvs_real_known(id);
    return NVS_LIKELY(real != NULL) ? real : nvs_real_resolve(id);
}

/* Typed real function: NVS_REAL(cuMemFree_v2)(pointer).  Resolved on first use, without a lock; when the driver lacks the function
 * the call returns CUDA_ERROR_NOT_SUPPORTED. */
#define NVS_REAL(symbol) ((__typeof__(&symbol))nvs_real(NVS_ID_##symbol))

/* True: the driver has this function. */
#define NVS_HAS(symbol) nvs_real_exists(NVS_ID_##symbol)
bool nvs_real_exists(nvs_id id);

/* "cuLaunchKernel_ptsz", "cuMemcpy_ptds": a null stream means the per-thread default stream.  A constant if the name is one. */
#define NVS_PER_THREAD(name)                                                                        \
    (sizeof(name) > 6 && (name)[sizeof(name) - 6] == '_' && (name)[sizeof(name) - 5] == 'p' &&      \
     (name)[sizeof(name) - 4] == 't')

/* The stream that a call of `symbol` names, as a handle that means the same to every function: never NULL. */
#define NVS_HANDLE(symbol, stream) nvs_stream_handle(stream, NVS_PER_THREAD(#symbol))
static inline CUstream nvs_stream_handle(CUstream stream, bool per_thread)
{
    return stream != NULL ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

nvs_id nvs_id_of_name(const char *name); /* NVS_ID_COUNT when the table has no such row */

/* The address for an application whose query of `name` the driver answered with `address`.  `version` and `flags` as for
 * cuGetProcAddress. */
void *nvs_translate(const char *name, void *address, int version, uint64_t flags);
/* The same if the name is the exported symbol itself, as with dlsym. */
void *nvs_translate_symbol(nvs_id id, const char *name, void *address);

/* True: an entry point of this name probably submits work.  A guess by words, for names that the table does not have. */
bool nvs_name_submits(const char *name);

/* A gated thunk for a function of unknown signature; `target` if no thunk is left.  init.c */
extern void *(*const nvs_thunk_for)(const char *name, void *target) __attribute__((visibility("hidden")));

static inline nvs_function nvs_as_function(void *address)
{
    nvs_function function;
    __builtin_memcpy(&function, &address, sizeof function); /* ISO C has no such cast; POSIX guarantees it */
    return function;
}

static inline void *nvs_as_address(nvs_function function)
{
    void *address;
    __builtin_memcpy(&address, &function, sizeof address);
    return address;
}

#endif
