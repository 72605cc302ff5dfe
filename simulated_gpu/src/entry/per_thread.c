/* The entry points whose default stream is the calling thread's own: they say so in the thread's record, then call the plain one. */
#include "base/sim.h"

#define NVS_SIM_PER_THREAD(symbol, plain, parameters, arguments)                                \
    SIM_EXPORT CUresult CUDAAPI symbol parameters                                               \
    {                                                                                           \
        nvs_sim_thread.per_thread = true;                                                       \
        return plain arguments;                                                                 \
    }
#include "entry/per_thread.def"
