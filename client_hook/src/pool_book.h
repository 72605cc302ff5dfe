/* What the driver's stream-ordered pools have given out: a flat table beside the registry (allocation.h).
 *
 * Why: programs allocate and free in stream order ten thousands of times a second.
 * No lock, no tree, no host memory to get: one line of the table is all that an allocation and its free touch.
 *
 * Invariant: an address stands in one place at most, and who takes it out is its only owner.
 * May not go here: figures, limits; memory that moves.
 */
#ifndef NVS_POOL_BOOK_H
#define NVS_POOL_BOOK_H

#include "base.h"

typedef struct nvs_pool_memory {
    uint64_t address;
    uint64_t charged_bytes;
    CUcontext context; /* whose end is its end; NULL: none */
    uint32_t gpu;
} nvs_pool_memory;

typedef struct nvs_pool_place nvs_pool_place;

/* False: there is no place for it here. */
bool nvs_pool_book_enter(const nvs_pool_memory *memory);
/* What begins at this address, for one caller only; NULL: nothing.  Others do not find it any more.  Then exactly one of the next two. */
nvs_pool_place *nvs_pool_book_claim(uint64_t address, nvs_pool_memory *out);
void nvs_pool_book_strike(nvs_pool_place *claimed);                    /* it is free */
void nvs_pool_book_restore(nvs_pool_place *claimed, uint64_t address); /* the driver keeps it */
/* The next that dies with its context, from `*place` on, which begins at 0; false: there is none any more. */
bool nvs_pool_book_take_of(CUcontext context, uint32_t *place, nvs_pool_memory *out);

void nvs_pool_book_after_fork(void); /* in the child: nothing is held */

#endif
