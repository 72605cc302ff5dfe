/* For functions that return what the first failing call said. */
#ifndef TRY_H
#define TRY_H

#include <cuda.h>

#define TRY(call)                                  \
    do {                                           \
        const CUresult failed_ = (call);           \
        if (failed_ != CUDA_SUCCESS)               \
            return failed_;                        \
    } while (0)

#endif
