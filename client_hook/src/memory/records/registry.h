/* The tree of allocations, for several steps under one hold of its lock. */
#ifndef NVS_REGISTRY_H
#define NVS_REGISTRY_H

#include "memory/records/allocation_types.h"

void nvs_registry_lock(void);
void nvs_registry_unlock(void);
nvs_allocation *nvs_registry_find(nvs_space space, uint64_t key);      /* containing */
nvs_allocation *nvs_registry_next(nvs_space space, uint64_t key);      /* first that begins at or after */
nvs_allocation *nvs_registry_insert(nvs_allocation *allocation);       /* as nvs_allocation_insert */
void nvs_registry_remove(nvs_allocation *allocation);
/* A mapping has ended: adds it to a list, and its handle if that has no other user. */
void nvs_registry_end_mapping(nvs_allocation *mapping, nvs_allocation **list);

void nvs_registry_after_fork(void); /* in the child: empty */

nvs_allocation *nvs_registry_first(uint32_t gpu);                       /* of all entries of a GPU, linked by `node.next` */
nvs_allocation *nvs_registry_first_deferred(uint32_t gpu);              /* oldest free; linked by `deferred.later` */
nvs_allocation *nvs_registry_last_deferred(uint32_t gpu);
uint32_t nvs_registry_deferred(uint32_t gpu);                           /* with held ones; without the lock, a hint, as the next */
uint64_t nvs_registry_deferred_bytes(uint32_t gpu);
void nvs_registry_defer(nvs_allocation *allocation);                    /* its free waits for a stream */
void nvs_registry_undefer(nvs_allocation *allocation);
/* A new entry covers this one: unlinks it, and adds it to a list if it has no other user. */
void nvs_registry_displace(nvs_allocation *other, nvs_allocation **list);

#endif
