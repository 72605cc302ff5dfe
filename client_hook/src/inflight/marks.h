/* Marks: events behind work that a later drain cannot query.
 *
 * Two kinds of work need them.  A graph's work on another GPU than its stream's shows in no context of that GPU: no query of a stream, event of
 * the context or wait for the context covers it; an event of the launch's own stream does (measured on a driver 580,
 * docs/decisions/drains-beside-captures.md).  While a capture is open, default streams cannot be queried (captures.h).
 *
 * One lock, taken with no other and not held while the driver is called.  A mark's event is queried only inside a visit to its context
 * (nvs_each_context), which therefore cannot end meanwhile, or by the thread that has just made it.
 *
 * Non-goals: the GPUs of a graph (hooks/graph.h); when a capture needs marks (captures.h); waiting.
 */
#ifndef NVS_MARKS_H
#define NVS_MARKS_H

#include "base/base.h"

/* Application thread: leaves a mark behind all work on this stream.  The stream is not captured; its work is on `gpus` (a bit each). */
void nvs_mark_stream(uint32_t gpus, uint32_t gpu_of_stream, CUstream stream);

/* Inside a visit to the context, in relaxed capture mode, while no stream of it is captured: leaves a mark behind all work in it. */
void nvs_mark_context(uint32_t gpu, CUcontext context);

/* The GPUs (a bit each) whose contexts have marks of work that may still run on this one. */
uint32_t nvs_marked_by(uint32_t gpu);

uint64_t nvs_marks_made(void); /* the number of the newest one */

/* Inside a visit to the context: true if a mark with a number up to `upto` is unfinished.  Finished marks are freed. */
bool nvs_mark_pending(uint32_t gpu, CUcontext context, uint64_t upto);

/* A context has ended, and its events with it. */
void nvs_marks_context_gone(CUcontext context);

void nvs_marks_after_fork(void); /* in the child: none */

/* An event behind all work on a stream, made in the stream's own context. */
CUresult nvs_event_behind(CUstream stream, CUevent *event, CUcontext *context);

#endif
