/* Memory that was freed in stream order, and is given back when the stream has come so far. */
#ifndef NVS_DEFERRED_H
#define NVS_DEFERRED_H

#include "memory/records/allocation.h"

/* Frees what deferred frees have become free by now; with `wait`, waits (boundedly) until at least one has.
 * Returns whether anything was freed. */
bool nvs_memory_reap(uint32_t gpu, bool wait);

/* By the backend. */
CUresult nvs_memory_give_back(const nvs_allocation *entry);
void nvs_memory_forget(nvs_allocation *entry); /* its context is gone */

#endif
