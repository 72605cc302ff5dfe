/* The registry of the streams that the application has created. */
#ifndef NVS_STREAMS_H
#define NVS_STREAMS_H

#include "base/base.h"

/* Calls visit for each live stream of a context until it returns false.  A stream that the application destroys
 * during its visit is destroyed after the visit. */
void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument);

/* Reports of the hooks (hooks/work/context.c). */
void nvs_stream_created(CUstream stream, CUcontext context);
bool nvs_stream_leaving(CUstream stream, CUcontext *context); /* false: a visitor destroys it later; NULL: not known */
CUcontext nvs_stream_context(CUstream stream);             /* NULL: not reported */
void nvs_streams_context_gone(CUcontext context);          /* the driver has destroyed the context, and its streams too */
void nvs_streams_after_fork(void);                         /* in the child: empties the registry */

#endif
