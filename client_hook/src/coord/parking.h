/* Parking: the program's calls stop before the driver while the coordinator has its process off the GPUs.  Agent thread only. */
#ifndef NVS_PARKING_H
#define NVS_PARKING_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

void nvs_parking_start(void);              /* of the agent */
void nvs_parking_told(const nvs_park *message); /* the coordinator's */
uint64_t nvs_parking_serve(uint64_t now);  /* looks for threads that need the driver; returns when to look again, UINT64_MAX: never */

#endif
