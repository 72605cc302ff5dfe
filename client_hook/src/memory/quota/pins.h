/* Memory that is going to stay on the card whoever has the lease: exported, reached by another GPU, or known to the driver alone.
 *
 * It leaves less for all others, so the coordinator is asked first, where it wants to be asked (nvs_agent_reserve_pins): what would
 * leave somebody too little to run is refused, and that is out of memory in the call that wanted it, instead of a wait for ever later.
 *
 * What is asked for and not yet counted as pinned is added to each further question, so threads that ask at the same time get no
 * more than there is.
 */
#ifndef NVS_PINS_H
#define NVS_PINS_H

#include "memory/records/allocation.h"

/* May `bytes` more become immovable?  If true, the caller calls nvs_pins_counted once they are counted, or will not be. */
bool nvs_pins_may(uint32_t gpu, uint64_t bytes);
void nvs_pins_counted(uint32_t gpu, uint64_t bytes);
/* To the log, once: `what` was refused. */
void nvs_pins_say_refused(const char *what);

/* nvs_memory_admit for the driver's own memory, which nobody but the driver can move. */
CUresult nvs_pins_admit(nvs_space space, nvs_memory_kind kind, uint32_t gpu, uint64_t bytes, nvs_allocation **out);

void nvs_pins_after_fork(void);

#endif
