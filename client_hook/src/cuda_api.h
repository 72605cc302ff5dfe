/* Expansions of cuda_api.def: ids, names, real pointers, lookup.  The table itself is the only list of functions. */
#ifndef NVS_CUDA_API_H
#define NVS_CUDA_API_H

#include "base.h"

/* Typed real function: NVS_REAL(cuMemFree_v2)(pointer).  Resolved on first use, without a lock; when the driver lacks the function
 * the call returns CUDA_ERROR_NOT_SUPPORTED. */

#endif
