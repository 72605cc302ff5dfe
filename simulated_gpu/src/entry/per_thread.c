/* The entry points for the per-thread default stream: each marks the thread, then calls the plain function. */
#include "entry/entry.h"

#define NVS_SIM_PER_THREAD(symbol, plain, parameters, arguments)                                \
    SIM_EXPORT CUresult CUDAAPI symbol parameters                                               \
    {                                                                                           \
        nvs_sim_thread.next_per_thread = true;                                                  \
        return plain arguments;                                                                 \
    }
#include "entry/per_thread.def"
