/* See slab.h. */
#include "host/slab.h"

#include "base/log.h"
#include "contexts/context.h"
#include "contexts/dead.h"
#include "driver/cuda_api.h"

#include <string.h>

enum { MAX_SLABS = 8192 };

static nvs_slab slabs[MAX_SLABS];
NVS_FORK_STATE static uint32_t slab_count; /* entries that were ever used */

/* --- one slab --- */

typedef struct registration {
    void *memory;
    size_t bytes;
    CUcontext in;
} registration;

static bool register_in(CUcontext context, void *argument)
{
    registration *r = argument;
    CUcontext ignored;
    if (!nvs_context_enter(context))
        return true;
    CUresult result = NVS_REAL(cuMemHostRegister_v2)(r->memory, r->bytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
        r->in = context;
    else if (nvs_context_error() == CUDA_SUCCESS) /* else the context is dead */
        NVS_LOG_ONCE(NVS_LOG_WARNING, "host memory cannot be pinned (error %d): evictions will be slow", (int)result);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

static bool unregister_in(CUcontext context, void *argument)
{
    registration *r = argument;
    CUcontext ignored;
    if (context != r->in || !nvs_context_enter(context))
        return true;
    NVS_REAL(cuMemHostUnregister)(r->memory);
    NVS_REAL(cuCtxPopCurrent_v2)(&ignored);
    return false;
}

bool nvs_slab_make(nvs_slab *out, uint32_t grains, uint32_t gpu, bool gently)
{
    nvs_host_mapping mapping;
    if (!nvs_host_map(gpu, grains * NVS_HOST_GRAIN, NVS_HOST_GRAIN, gently, &mapping))
        return false;
    registration r = {mapping.memory, grains * NVS_HOST_GRAIN, NULL};
    nvs_each_context(gpu, register_in, &r);
    *out = (nvs_slab){.mapping = mapping, .grains = grains, .free_grains = grains, .registered = r.in};
    return true;
}

void nvs_slab_end(const nvs_slab *slab, uint32_t gpu)
{
    registration r = {slab->mapping.memory, slab->grains * NVS_HOST_GRAIN, slab->registered};
    if (slab->registered != NULL)
        nvs_each_context(gpu, unregister_in, &r);
    nvs_host_unmap(&slab->mapping);
}

/* --- the table --- */

bool nvs_slabs_add(const nvs_slab *made)
{
    uint32_t index = 0;
    while (index < slab_count && slabs[index].grains != 0)
        index++;
    if (index == MAX_SLABS)
        return false;
    slabs[index] = *made;
    slab_count = index + 1 > slab_count ? index + 1 : slab_count;
    return true;
}

bool nvs_slabs_remove_unused(uint64_t most, nvs_slab *out)
{
    for (uint32_t i = 0; i < slab_count; i++) {
        if (slabs[i].grains == 0 || slabs[i].free_grains != slabs[i].grains || slabs[i].grains > most)
            continue;
        *out = slabs[i];
        slabs[i] = (nvs_slab){0};
        return true;
    }
    return false;
}

/* Takes up to `grains` free grains, from the first free one on.  `adjacent`: neighbours, all or none. */
static uint32_t take_from(nvs_slab *slab, uint32_t grains, void **out, bool adjacent)
{
    uint32_t got = 0;
    for (uint32_t i = 0; i < slab->grains && got < grains; i++) {
        const bool used = (slab->used[i / 64] >> (i % 64)) & 1;
        if (used && adjacent)
            got = 0;
        if (!used)
            out[got++] = slab->mapping.memory + i * NVS_HOST_GRAIN;
    }
    if (adjacent && got < grains)
        return 0;
    for (uint32_t i = 0; i < got; i++) {
        const uint64_t index = (uint64_t)((char *)out[i] - slab->mapping.memory) / NVS_HOST_GRAIN;
        slab->used[index / 64] |= UINT64_C(1) << (index % 64);
    }
    slab->free_grains -= got;
    return got;
}

void nvs_slabs_take(uint32_t grains, void **out)
{
    uint32_t got = 0;
    for (uint32_t i = 0; i < slab_count; i++)
        if (slabs[i].free_grains >= grains && take_from(&slabs[i], grains, out, true) == grains)
            return;
    for (uint32_t i = 0; i < slab_count && got < grains; i++)
        got += take_from(&slabs[i], grains - got, out + got, false);
}

static nvs_slab *slab_of(const char *grain, uint64_t *index)
{
    for (uint32_t i = 0; i < slab_count; i++) {
        nvs_slab *slab = &slabs[i];
        *index = (uint64_t)(grain - slab->mapping.memory) / NVS_HOST_GRAIN;
        if (slab->grains != 0 && grain >= slab->mapping.memory && *index < slab->grains)
            return slab;
    }
    return NULL;
}

uint32_t nvs_slabs_give(uint32_t grains, void *const *taken)
{
    uint32_t given = 0;
    for (uint32_t i = 0; i < grains; i++) {
        uint64_t index;
        nvs_slab *slab = slab_of(taken[i], &index);
        if (slab == NULL)
            continue;
        slab->used[index / 64] &= ~(UINT64_C(1) << (index % 64));
        slab->free_grains++;
        given++;
    }
    return given;
}

void nvs_slabs_context_gone(CUcontext context)
{
    for (uint32_t i = 0; i < slab_count; i++)
        if (slabs[i].registered == context)
            slabs[i].registered = NULL;
}

NVS_FORK_CODE void nvs_slabs_after_fork(void)
{
    memset(slabs, 0, slab_count * sizeof slabs[0]); /* the child has none of the memory (MADV_DONTFORK) */
    slab_count = 0;
}
