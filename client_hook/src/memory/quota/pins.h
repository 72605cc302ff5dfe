/* Pinned memory, which stays on the card without a lease: exported, accessed by another GPU, or the driver's.
 *
 * It leaves less for other programs, so the hook requests it from the coordinator (nvs_agent_reserve_pins).  A refusal makes the call out of memory;
 * otherwise a program that does not fit beside it would wait for ever.  A request includes the bytes of concurrent requests, so that together they get no
 * more than there is.
 */
#ifndef NVS_PINS_H
#define NVS_PINS_H

#include "memory/records/allocation.h"

/* Whether `bytes` more may be pinned.  If true, the caller calls nvs_pins_counted when they are counted, or will not be. */
bool nvs_pins_may(uint32_t gpu, uint64_t bytes);
void nvs_pins_counted(uint32_t gpu, uint64_t bytes);
/* Logs once that `what` was refused. */
void nvs_pins_log_refused(const char *what);

/* nvs_memory_admit for memory of the driver, which the hook cannot move. */
CUresult nvs_pins_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);

void nvs_pins_after_fork(void);

#endif
