/* Bounds the work in flight (pacing.c), and waits for its end (drain.c).
 *
 * Pacing records events between submissions, and keeps the estimated GPU time in flight below the coordinator's budget; coarsely for a program
 * that is alone on the GPU.  It leaves captured streams alone.
 */
#ifndef NVS_PACING_H
#define NVS_PACING_H

#include "base/base.h"
#include "inflight/stream.h"

/* Application thread, after a submission to `stream` when nvs_gate_leave() said so; outside the gate.  `stream` by NVS_HANDLE,
 * `what` by nvs_pace_what().  May wait until enough work is done. */
void nvs_pace_after(uint32_t gpu, CUstream stream, uint64_t what);

/* Application thread, after a call that waited for submitted work: pacing is not the cause if the GPU is idle now. */
void nvs_pace_synchronized(void);

/* 0: the program is alone on the GPU; then the last other value, or 10 ms, bounds the wait of the next program.  Without a call for a GPU
 * its work is not paced.  `most_ns`: limits the budget, also while the program is alone; 0: no limit. */
void nvs_pacing_set_budget(uint32_t gpu, uint64_t budget_ns, uint64_t most_ns);

/* Gate closed: waits until everything submitted on this GPU is done, or the deadline (absolute) passed. */
nvs_status nvs_drain_closed(uint32_t gpu, uint64_t deadline_ns);

/* The same for the contexts that no thread ends now; the caller may be in the gate. */
nvs_status nvs_drain(uint32_t gpu, uint64_t deadline_ns);

/* Agent thread, gate closed: nothing submitted is unfinished, as far as one look can tell.  Takes at most about 100 us. */
bool nvs_gpu_idle(uint32_t gpu);

/* Agent thread, gate open or not: whether this GPU has unfinished work of this process in the legacy stream or a stream that the program created.  Work in a
 * per-thread default stream is not seen.  Only queries; submits nothing.  False: a capture is open, and `busy` is not set. */
bool nvs_gpu_sample(uint32_t gpu, bool *busy);

/* A context is about to be destroyed or reset, and with it the events of pacing in it.  Cheap; any thread. */
void nvs_pacing_context_gone(CUcontext context);

void nvs_pacing_after_fork(void);

#endif
