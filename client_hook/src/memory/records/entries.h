/* Entries of the registry, with the bytes that they are charged with. */
#ifndef NVS_ENTRIES_H
#define NVS_ENTRIES_H

#include "memory/records/allocation.h"

void nvs_memory_in_chunks(nvs_allocation *admitted); /* the backend has its own figures of it */
void nvs_memory_correct(nvs_allocation *admitted, uint64_t bytes); /* the driver's size differs from the estimate */
void nvs_memory_keep(nvs_allocation *admitted, uint64_t key, uint64_t length); /* the driver has made the memory */
void nvs_memory_drop(nvs_allocation *taken);                                   /* uncharges and frees the entry */
void nvs_memory_drop_all(nvs_allocation *list);                                /* linked by `node.next` */
/* For backends: sets how much of an extent is off the GPU. */
void nvs_memory_set_evicted(uint32_t gpu, const nvs_extent *extent, uint64_t evicted_bytes);

#endif
