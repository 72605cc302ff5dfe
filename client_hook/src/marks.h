/* Where a graph computes on another GPU than its stream's: an event behind each such launch.
 *
 * Why: the GPU's own contexts know nothing of that part.  Neither a query of their streams, nor an event of the whole context, nor waiting for the context
 * waits for it; an event of the launch's own stream does (measured on a driver 580, docs/decisions.md).
 *
 * One lock, taken with no other and not held while the driver is called.  A mark's event is asked about only inside of a visit to its context
 * (nvs_each_context), which therefore cannot end meanwhile, or by the thread that has just made it.
 *
 * May not go here: which GPUs a graph is on (graph_gpus.h); waiting.
 */
#ifndef NVS_MARKS_H
#define NVS_MARKS_H

#include "base.h"

/* Application thread, inside of the gates of these GPUs (a bit each), after a launch on this stream, of another GPU. */
void nvs_mark_graph(uint32_t gpus, uint32_t gpu_of_stream, CUstream stream, bool per_thread);

/* The GPUs on whose streams graphs have been launched that may still compute on this one. */
uint32_t nvs_marked_by(uint32_t gpu);

/* Inside of a visit to the context: is one of those unfinished that were launched in it?  What is finished is forgotten. */
bool nvs_mark_pending(uint32_t gpu, CUcontext context);

/* A context has ended, and its events with it. */
void nvs_marks_context_gone(CUcontext context);

void nvs_marks_after_fork(void); /* in the child: none */

/* An event behind everything that is queued on a stream, made in the stream's own context. */
CUresult nvs_event_behind(CUstream stream, bool per_thread, CUevent *event, CUcontext *context);

#endif
