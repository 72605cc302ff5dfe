/* See progress.h.
 *
 * The agent looks at the counts every 100 ms while the lease is held, and reports them if they have changed.  Without a change it
 * looks less and less often, so that an idle program sleeps.  Counting costs the application's threads nothing: the gate counts anyway.
 *
 * While the coordinator wants it, the agent also samples every millisecond whether the GPU has unfinished work of this process.  The sample stands
 * for the time since the one before; samples after a longer pause, or during a capture, do not count.
 */
#include "coord/progress.h"

#include "base/process.h"
#include "coord/mailbox.h"
#include "coord/protocol/link.h"
#include "gate/gate.h"
#include "inflight/pacing.h"

#include <string.h>

#define REPORT_NS 100000000u
#define LONGEST_NS 1600000000u /* between two looks without a change */
#define SAMPLE_NS 1000000u
#define STALE_NS 4000000u      /* an interval that is longer is not the sample's */

static struct progress {
    nvs_allot allot;    /* the newest on this connection */
    uint64_t lease_id;  /* the lease of the looks; 0: none */
    uint64_t look_at_ns;
    uint64_t pause_ns;  /* between two looks */
    nvs_progress sent;  /* the last report */
    uint64_t busy_ns, watched_ns;
    uint64_t sampled_ns; /* the last sample; 0: none on this lease */
} all[NVS_MAX_GPUS];

static const nvs_allot nothing_allotted = {.rate = 1000};

void nvs_progress_start(void)
{
    memset(all, 0, sizeof all);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_progress_lost(gpu);
}

void nvs_progress_lost(uint32_t gpu)
{
    all[gpu].allot = nothing_allotted;
}

void nvs_progress_allot(const nvs_allot *allot)
{
    all[allot->gpu].allot = *allot;
}

/* False: nothing has changed since the last report. */
static bool report(uint32_t gpu, uint64_t lease_id)
{
    nvs_progress *sent = &all[gpu].sent;
    const uint64_t work = nvs_gate_calls(gpu);
    const uint64_t steps = atomic_load_explicit(&nvs_steps, memory_order_relaxed); /* a count */
    if (work == sent->work && steps == sent->steps && all[gpu].busy_ns == sent->busy_ns)
        return false;
    *sent = (nvs_progress){.gpu = (uint8_t)gpu, .lease_id = lease_id, .at_ns = nvs_now_ns(), .work = work, .busy_ns = all[gpu].busy_ns,
                           .watched_ns = all[gpu].watched_ns, .steps = steps};
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    nvs_link_send(frame, nvs_encode_progress(sent, frame, sizeof frame));
    return true;
}

void nvs_progress_before_release(uint32_t gpu, uint64_t lease_id)
{
    if (all[gpu].allot.report)
        (void)report(gpu, lease_id);
}

/* Returns when the next sample is due. */
static uint64_t sample(uint32_t gpu, uint64_t now)
{
    struct progress *its = &all[gpu];
    const uint64_t since_ns = now - its->sampled_ns;
    bool busy = false;
    if (its->sampled_ns != 0 && since_ns < SAMPLE_NS)
        return its->sampled_ns + SAMPLE_NS;
    if (nvs_gpu_sample(gpu, &busy) && since_ns < STALE_NS) {
        its->watched_ns += since_ns;
        its->busy_ns += busy ? since_ns : 0;
    }
    its->sampled_ns = now;
    return now + SAMPLE_NS;
}

uint64_t nvs_progress_serve(uint32_t gpu, uint64_t lease_id, uint64_t now)
{
    struct progress *its = &all[gpu];
    if (!its->allot.report || lease_id == 0) {
        its->lease_id = its->sampled_ns = 0;
        return UINT64_MAX;
    }
    if (its->lease_id != lease_id) {
        its->lease_id = lease_id;
        its->pause_ns = REPORT_NS;
        its->look_at_ns = now + REPORT_NS;
        its->sampled_ns = 0;
    } else if (now >= its->look_at_ns) {
        if (report(gpu, its->lease_id))
            its->pause_ns = REPORT_NS;
        else
            its->pause_ns = its->pause_ns < LONGEST_NS / 2 ? 2 * its->pause_ns : LONGEST_NS;
        its->look_at_ns = now + its->pause_ns;
    }
    if (!its->allot.watch)
        return its->look_at_ns;
    const uint64_t sample_at = sample(gpu, now);
    return sample_at < its->look_at_ns ? sample_at : its->look_at_ns;
}
