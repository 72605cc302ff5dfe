/* Memory that was freed in stream order, and goes back when its stream has reached the free. */
#ifndef NVS_DEFERRED_H
#define NVS_DEFERRED_H

#include "memory/records/allocation.h"

/* Ends the deferred frees whose streams have reached them; `wait`: waits for at least one, with a limit.  Returns whether memory was freed. */
bool nvs_memory_reap(uint32_t gpu, bool wait);

/* Frees the memory by its backend. */
CUresult nvs_memory_give_back(const nvs_allocation *entry);
void nvs_memory_forget(nvs_allocation *entry); /* its context has ended */

#endif
