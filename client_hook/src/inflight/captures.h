/* Open stream captures, and marks of the work that a drain cannot query meanwhile.
 *
 * While a stream of a context is captured, the driver refuses an event of the whole context and a wait for it, and the refusal invalidates the
 * capture.  A drain can still query the streams that the program created, but not the default streams: beside a capture on a blocking stream
 * the legacy stream refuses every query, and a per-thread stream can be queried on its own thread only (measured on a driver 580,
 * docs/decisions/drains-beside-captures.md).  Marks (marks.h) stand for that work:
 *  - before the first capture begins, one mark of each whole context;
 *  - while a capture is open, one mark behind each submission to a default stream;
 *  - before a stream becomes part of a capture, one mark behind the work that it still has.
 * After the first host function (host_functions.h) submissions to per-thread streams have marks for good, and so has a stream that is destroyed.
 *
 * Non-goals: waiting for work; the captured work (hooks/context.c).
 */
#ifndef NVS_CAPTURES_H
#define NVS_CAPTURES_H

#include "base/hot.h"

/* True while a stream of this process is captured: no whole context may be synchronised.  Captures begin inside the gate, so with every gate
 * closed the answer can only change to false.  The marks of the whole contexts exist before it is true. */
static inline bool nvs_capturing(void)
{
    const uint32_t flags = NVS_CAPTURE_FIRST | NVS_CAPTURE_HOST;
    return (atomic_load_explicit(&nvs_hot.capturing, memory_order_acquire) & ~flags) != 0; /* pairs with nvs_capture_begins */
}

/* Keeps captures from beginning while streams are queried with the gate open: a query beside a capture invalidates it.  False: one is open; nothing may be
 * queried.  Else nvs_captures_resume comes after some microseconds.  Agent thread only. */
bool nvs_captures_pause(void);
void nvs_captures_resume(void);

typedef struct nvs_capture nvs_capture; /* an entry for an open capture */

/* Before and after the driver's begin, in the gate.  NULL: the host has no memory for the entry, and the capture must not begin.  A failed begin leaves no
 * entry. */
nvs_capture *nvs_capture_begins(uint32_t gpu, CUstream stream);
void nvs_capture_began(nvs_capture *made, uint32_t gpu, CUstream stream, CUresult result);

/* Before and after a call that may add the stream to a capture.  nvs_capture_joined: both GPUs (a bit each) if the capture began on another one, else 0. */
void nvs_capture_may_join(uint32_t gpu, CUstream stream);
uint32_t nvs_capture_joined(uint32_t gpu, CUstream stream);

void nvs_capture_ended(CUstream stream);
void nvs_capture_lost(CUstream stream);            /* before the stream is destroyed; the driver refuses that while it is captured */
void nvs_captures_context_gone(CUcontext context); /* it has ended, and the captures on its streams with it */
void nvs_captures_after_fork(void);                /* in the child: none */

/* From now on work in per-thread default streams has marks, also while no stream is captured.  For a moment the process seems to capture. */
void nvs_captures_mark_threads(void);

void nvs_capture_mark(uint32_t gpu, CUstream stream, CUresult result);

/* After a submission, still in the gate: a drain that begins later finds the mark.
 * Relaxed: the driver orders the submission with the event of the whole context.  If the event came first, the submission's thread has seen the driver
 * after nvs_capture_begins had written this word; else the event covers the submission. */
static inline void nvs_capture_submitted(uint32_t gpu, CUstream stream, CUresult result)
{
    if (NVS_UNLIKELY(atomic_load_explicit(&nvs_hot.capturing, memory_order_relaxed) != 0))
        nvs_capture_mark(gpu, stream, result);
}

#endif
