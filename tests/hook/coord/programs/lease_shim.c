/* lease_machine.c with plain functions, so that a test can drive it by ctypes. */
#include "coord/protocol/lease_machine.h"

#include <stdlib.h>

nvs_lease *shim_new(int run_on_loss, uint64_t loss_timeout_ns)
{
    nvs_lease *lease = malloc(sizeof *lease);
    if (lease != NULL)
        nvs_lease_init(lease, run_on_loss != 0, loss_timeout_ns);
    return lease;
}

void shim_free(nvs_lease *lease)
{
    free(lease);
}

uint32_t shim_event(nvs_lease *lease, int kind, uint64_t now_ns, uint64_t lease_id, uint64_t number, uint64_t other, int flag)
{
    nvs_lease_event event = {(nvs_lease_event_kind)kind, now_ns, lease_id, number, other, flag != 0};
    return nvs_lease_handle(lease, &event);
}

uint32_t shim_use(nvs_lease *lease, uint64_t now_ns)
{
    return nvs_lease_use(lease, now_ns);
}

uint64_t shim_next_tick(const nvs_lease *lease, uint64_t now_ns)
{
    return nvs_lease_next_tick(lease, now_ns);
}

uint64_t shim_get(const nvs_lease *lease, int what)
{
    switch (what) {
    case 0: return (uint64_t)lease->state;
    case 1: return lease->grant.id;
    case 2: return lease->wanted;
    case 3: return lease->paced;
    case 4: return lease->grant.waiters;
    case 5: return lease->release.id;
    case 6: return lease->release.reason;
    case 7: return lease->release.wanted;
    case 8: return lease->end.deadline_ns;
    case 9: return nvs_lease_open(lease);
    default: return lease->grant.opened_at_ns;
    }
}
