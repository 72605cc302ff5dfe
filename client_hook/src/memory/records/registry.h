/* The tree of allocations under its lock, for steps that must be one hold of the lock. */
#ifndef NVS_REGISTRY_H
#define NVS_REGISTRY_H

#include "memory/records/allocation_types.h"

void nvs_registry_lock(void);
void nvs_registry_unlock(void);
nvs_allocation *nvs_registry_find(nvs_space space, uint64_t key);      /* containing */
nvs_allocation *nvs_registry_next(nvs_space space, uint64_t key);      /* first that begins at or after */
nvs_allocation *nvs_registry_insert(nvs_allocation *allocation);       /* as nvs_allocation_insert */
void nvs_registry_remove(nvs_allocation *allocation);
/* A mapping is no more: adds it, and its handle if that was the last thing that kept it, to a list. */
void nvs_registry_end_mapping(nvs_allocation *mapping, nvs_allocation **list);

void nvs_registry_after_fork(void); /* in the child: CUDA is not usable there, nothing is held */

nvs_allocation *nvs_registry_first(uint32_t gpu);                       /* of all entries of a GPU, linked by `next` */
nvs_allocation *nvs_registry_first_deferred(uint32_t gpu);              /* oldest free; linked by `later_free` */
nvs_allocation *nvs_registry_last_deferred(uint32_t gpu);
uint32_t nvs_registry_deferred(uint32_t gpu);                           /* how many, held ones included; without the lock, a hint, as the next */
uint64_t nvs_registry_deferred_bytes(uint32_t gpu);
void nvs_registry_defer(nvs_allocation *allocation);                    /* its free waits for a stream */
void nvs_registry_undefer(nvs_allocation *allocation);
/* What a new entry covers is gone: unlinks it, and adds what nobody else still has a use for to a list. */
void nvs_registry_displace(nvs_allocation *other, nvs_allocation **list);

#endif
