/* Bounded in-flight work (pacing.c), and how to wait for its end (drain.c).
 *
 * Pacing: events between submissions, so many that the estimated GPU time in flight stays below the budget
 * that the coordinator sets; coarsely for who has the GPU to itself.  Nothing here touches a stream that is being captured.
 */
#ifndef NVS_PACING_H
#define NVS_PACING_H

#include "base/base.h"
#include "inflight/cost.h"

/* Application thread, after a submission to `stream` when nvs_gate_leave() said so; outside the gate. `stream` as the
 * application gave it; per_thread when the entry point was a _ptsz/_ptds one; `what` by nvs_pace_what().  May wait until enough
 * work is done. */
void nvs_pace_after(uint32_t gpu, CUstream stream, bool per_thread, uint64_t what);

/* Application thread, after a call that waited for submitted work: if the GPU is idle now, that is no harm of ours. */
void nvs_pace_synchronized(void);

/* 0: nobody else uses the GPU; then the last other value, or 10 ms, bounds what the first one to come would wait for.  Never
 * called for a GPU: not paced at all. */
void nvs_pacing_set_budget(uint32_t gpu, uint64_t budget_ns);

/* Gate closed: waits until everything submitted on this GPU is done, or the deadline (absolute) passed. */
nvs_status nvs_drain_closed(uint32_t gpu, uint64_t deadline_ns);

/* The same of the contexts that nobody is ending just now, for a thread that may be in the gate itself. */
nvs_status nvs_drain(uint32_t gpu, uint64_t deadline_ns);

/* Agent thread, gate closed: nothing submitted is unfinished, as far as one look can tell.  Takes at most about 100 us. */
bool nvs_gpu_idle(uint32_t gpu);

/* A context is about to be destroyed or reset, and with it the events of pacing in it.  Cheap; any thread. */
void nvs_pacing_context_gone(CUcontext context);

void nvs_pacing_after_fork(void);

#endif
