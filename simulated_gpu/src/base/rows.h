/* Expands ENTRY(symbol, CUDA version since) for each row of the hook's table.  Included more than once. */
#define NVS_STREAM(symbol, since, parameters, arguments, stream) ENTRY(symbol, since)
#define NVS_CURRENT(symbol, since, parameters, arguments) ENTRY(symbol, since)
#define NVS_CUSTOM(symbol, since) ENTRY(symbol, since)
#define NVS_PASS(symbol, since, reason) ENTRY(symbol, since)
#define NVS_THUNK(symbol, since, reason) ENTRY(symbol, since)
#define NVS_FOREIGN(symbol, since, reason) ENTRY(symbol, since)
#include "driver/cuda_api.def"
