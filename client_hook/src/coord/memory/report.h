/* Reports of this program's memory to the coordinator.  Agent thread only. */
#ifndef NVS_REPORT_H
#define NVS_REPORT_H

#include "base/base.h"

bool nvs_report_is_due(uint32_t gpu);               /* the figures have changed since the last one */
uint64_t nvs_report_at(uint32_t gpu);               /* the earliest time, unless a release follows */
void nvs_report_memory(uint32_t gpu, uint64_t now_ns);

#endif
