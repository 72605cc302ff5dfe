/* See notice.h. */
#include "coord/waiting/notice.h"

#include "base/log.h"
#include "base/process.h"
#include "coord/mailbox.h"
#include "coord/protocol/link.h"
#include "gate/gate.h"

#include <string.h>

#define PATIENCE_NS 5000000000u
#define QUIET_NS 60000000000u /* between the end of one wait that was printed and the next such line */

static struct wait {
    uint64_t since_ns; /* of the present wait; 0: no thread waits */
    uint64_t quiet_until_ns;
    uint32_t index;    /* the GPU's number on the node, known once `printed` */
    bool asked, printed;
} waits[NVS_MAX_GPUS];

void nvs_notice_start(void)
{
    memset(waits, 0, sizeof waits);
}

static void end(struct wait *wait, bool passed, uint64_t now)
{
    if (wait->printed) {
        wait->quiet_until_ns = now + QUIET_NS;
        if (passed) /* else the threads have gone without the GPU */
            nvs_log_notice("GPU %u after %llu s", wait->index, (unsigned long long)((now - wait->since_ns) / 1000000000u));
    }
    wait->since_ns = 0;
    wait->asked = wait->printed = false;
}

uint64_t nvs_notice_serve(uint32_t gpu, bool asked, uint64_t now)
{
    struct wait *wait = &waits[gpu];
    const bool passed = nvs_gate_passes(gpu);
    if (atomic_exchange_explicit(&nvs_mail[gpu].stopped, 0, memory_order_relaxed) != 0) /* see agent.c */
        nvs_log_notice("a signal has ended the wait for the GPU; the call that waited fails with CUDA error %d", NVS_STOPPED_RESULT);
    if (passed || nvs_gate_waiting(gpu) == 0) {
        if (wait->since_ns != 0)
            end(wait, passed, now);
        return UINT64_MAX;
    }
    if (wait->since_ns == 0)
        wait->since_ns = now;
    if (wait->asked || !asked)
        return UINT64_MAX;
    const uint64_t patient = wait->since_ns + PATIENCE_NS, at = patient > wait->quiet_until_ns ? patient : wait->quiet_until_ns;
    if (now < at)
        return at;
    wait->asked = true;
    NVS_LINK_SEND(explain_wait, (uint8_t)gpu);
    return UINT64_MAX;
}

void nvs_notice_explained(const nvs_wait_explained *answer)
{
    struct wait *wait = &waits[answer->gpu];
    if (!wait->asked || wait->printed || nvs_gate_passes(answer->gpu))
        return;
    wait->printed = true;
    wait->index = answer->index;
    nvs_log_notice("%s", answer->text);
}

void nvs_notice_lost(void)
{
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        waits[gpu].asked = waits[gpu].printed;
}
