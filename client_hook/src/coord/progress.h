/* Reports of this program's progress, and the coordinator's allotments.  Agent thread only. */
#ifndef NVS_PROGRESS_H
#define NVS_PROGRESS_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

void nvs_progress_start(void);                               /* at the start of the agent */
void nvs_progress_lost(uint32_t gpu);                        /* the connection, and with it the allotment */
void nvs_progress_allot(const nvs_allot *allot);
void nvs_progress_before_release(uint32_t gpu, uint64_t lease_id);
/* Reports if due.  `lease_id` is the lease under which the program runs, 0: it does not run.  Returns when to serve again,
 * UINT64_MAX: never. */
uint64_t nvs_progress_serve(uint32_t gpu, uint64_t lease_id, uint64_t now);

#endif
