/* The registry of contexts: which live on a GPU, and which of them a drain must look at.
 *
 * CUDA's own bookkeeping is followed, not replaced: the hooks of the context functions report here, and a context that they cannot have
 * seen is asked of the driver.  Only queries that a stream capture allows are made.
 */
#ifndef NVS_CONTEXT_H
#define NVS_CONTEXT_H

#include "base/hot.h"

#include <stdatomic.h>

/* True if alive; false for NULL. */
bool nvs_context_lives(CUcontext context);

/* For calls of the hook's own: makes it current, to be popped, if it lives.  Never cuCtxPushCurrent itself: a driver takes one that has been destroyed,
 * and crashes when that is popped. */
bool nvs_context_enter(CUcontext context);

/* The context that what is allocated now belongs to: the current one, or the primary one of which that is a part (a green
 * context ends without its memory).  NULL: none. */
CUcontext nvs_owner_context(void);

/* The same, mostly without asking the driver: where the hooks have seen one context only it is taken for the current one. */
CUcontext nvs_usual_owner(void);

/* Calls visit for each live context of a GPU (primary contexts included) until it returns false.  The registry is
 * not locked during visit; a context that dies meanwhile yields CUDA errors, which the visitor must survive.  False: one was
 * left out, as a thread is about to end it; its work may run. */
bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument);

/* A visit of one context, which does not end meanwhile: nvs_context_unhold ends the visit.  0: the context is about to end, or not known. */
size_t nvs_context_hold(CUcontext context);
void nvs_context_unhold(size_t visit);

/* A thread is about to end the context and waits for its visits: a long one is cut short. */
bool nvs_context_ends(CUcontext context);

/* Reports of the hooks (hooks/work/context.c). */
void nvs_context_learn(void);                              /* the driver is initialised */
bool nvs_context_possible(uint32_t gpu);                   /* it is, in this very process, and has that GPU */
void nvs_context_created(CUcontext context, uint32_t gpu); /* idempotent */
void nvs_context_is_green(CUcontext context, CUcontext primary); /* of one that was reported */
CUcontext nvs_green_owner(CUcontext context);              /* that primary one; NULL: that was not said, or it is gone */
uint32_t nvs_context_registered_gpu(CUcontext context);    /* NVS_NO_GPU: it is not known here */
uint32_t nvs_primary_gpu(CUcontext context);               /* whose primary one it was last: after a reset it comes back with the next use */
bool nvs_context_leaving(CUcontext context, const nvs_slot *by); /* about to be destroyed, by the thread of this slot: no new visits; false when
                                                               it was not known */
void nvs_context_await_visitors(CUcontext context);         /* of one that leaves: all visits have ended */
void nvs_context_gone(CUcontext context);                  /* it is; its streams with it */
void nvs_primary_retained(uint32_t gpu, CUcontext context);
CUcontext nvs_primary_released(uint32_t gpu, bool *last);  /* NULL: none was seen; last: no reference that was seen is left */

void nvs_contexts_after_fork(void);                        /* in the child: none */

/* Room for one more entry at the end of a table; false when the host has no memory. */
bool nvs_table_extend(void **table, size_t *count, size_t size);

#endif
