/* Which GPU a call is for, and which contexts and streams a drain must look at.
 *
 * CUDA's own bookkeeping is followed, not replaced: the hooks of the context and stream functions report here.
 */
#ifndef NVS_CONTEXT_H
#define NVS_CONTEXT_H

#include "base.h"

/* GPU ordinal (CUdevice) of the calling thread's current context; NVS_NO_GPU when there is none. A few ns. */
uint32_t nvs_current_gpu(void);

/* GPU of a stream handle; of the current context for the default streams.  Cached per thread. */
uint32_t nvs_stream_gpu(CUstream stream);

/* GPU of a context handle; NVS_NO_GPU when it is not known. */
uint32_t nvs_context_gpu(CUcontext context);

/* Is a stream capture under way in this process?  Then nothing context-wide may be synchronised. */
bool nvs_capturing(void);

/* Calls visit for each live context of a GPU (primary contexts included) until it returns false.  The registry is
 * not locked during visit; a context that dies meanwhile yields CUDA errors, which the visitor must survive. */
void nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument);

/* The same for the live streams that the application created in a context. */
void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument);

typedef struct nvs_gpu_facts {
    char uuid[96];        /* "GPU-..." or "MIG-...", as NVML writes it */
    uint64_t total_bytes; /* of the real card */
} nvs_gpu_facts;
nvs_status nvs_gpu_describe(uint32_t gpu, nvs_gpu_facts *out);

#endif
