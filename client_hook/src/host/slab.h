/* Slabs of pinned host memory, and the grains of them that are in use.
 *
 * Functions on the table of slabs (nvs_slabs_*) run under the pool's lock (host/pool.c).  Functions on one slab call the driver and the system,
 * and run unlocked.
 *
 * Non-goals: when slabs are made and freed.
 */
#ifndef NVS_HOST_SLAB_H
#define NVS_HOST_SLAB_H

#include "host/system.h"

enum { NVS_SLAB_GRAINS = 128 };

typedef struct nvs_slab { /* its memory does not move while a grain is in use */
    nvs_host_mapping mapping;
    uint32_t grains, free_grains; /* `grains` 0: an empty entry of the table */
    CUcontext registered; /* the context of the registration; NULL: none, and copies are slower */
    uint64_t used[NVS_SLAB_GRAINS / 64];
} nvs_slab;

bool nvs_slab_make(nvs_slab *out, uint32_t grains, uint32_t gpu, bool gently);
void nvs_slab_end(const nvs_slab *slab, uint32_t gpu);

bool nvs_slabs_add(const nvs_slab *made); /* false: the table is full */
/* Takes one slab without a grain in use, of at most `most` grains, out of the table. */
bool nvs_slabs_remove_unused(uint64_t most, nvs_slab *out);
/* As many grains must be free.  Neighbours, if one slab has enough of them. */
void nvs_slabs_take(uint32_t grains, void **out);
uint32_t nvs_slabs_give(uint32_t grains, void *const *taken); /* returns how many were in use */
void nvs_slabs_context_gone(CUcontext context);
void nvs_slabs_after_fork(void);

#endif
