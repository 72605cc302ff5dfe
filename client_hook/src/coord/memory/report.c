/* See report.h. */
#include "coord/memory/report.h"

#include "base/config.h"
#include "coord/protocol/link.h"
#include "memory/memory.h"

/* At most one report in that time.  In mode `device` no memory moves, and the coordinator acts upon no report. */
#define REPORT_NS (nvs_config.memory_mode == NVS_MODE_DEVICE ? 100000000u : 10000000u)

static uint64_t reported_ns[NVS_MAX_GPUS];

void nvs_report_memory(uint32_t gpu, uint64_t now_ns)
{
    nvs_usage usage;
    /* seq_cst: the flag goes before the figures are read, see nvs_agent_memory_changed */
    (void)atomic_exchange_explicit(&nvs_ledgers[gpu].to_report, 0, memory_order_seq_cst);
    nvs_memory_usage(gpu, &usage);
    reported_ns[gpu] = now_ns;
    NVS_LINK_SEND(memory_report, (uint8_t)gpu, usage.allocated_bytes, usage.resident_bytes, usage.pinned_bytes,
                  usage.host_bytes);
}

bool nvs_report_is_due(uint32_t gpu)
{
    return atomic_load_explicit(&nvs_ledgers[gpu].to_report, memory_order_seq_cst) != 0; /* pairs with the exchange above */
}

uint64_t nvs_report_at(uint32_t gpu)
{
    return reported_ns[gpu] + REPORT_NS;
}
