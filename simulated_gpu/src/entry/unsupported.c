/* A weak body for every export: CUDA_ERROR_NOT_SUPPORTED.  An implementation in another file replaces it at link time.
 *
 * cuda.h may not be included here: these bodies ignore their parameters, which the C calling conventions of Linux allow.
 */
#include "entry/table.h"

#define NVS_SIM_EXPORT(name, symbol, since, per_thread)                                         \
    __attribute__((weak, visibility("default"))) int symbol(void);                              \
    int symbol(void) { return nvs_sim_unsupported(#symbol); }
#include "entry/exports.def"
#undef NVS_SIM_EXPORT

const sim_entry nvs_sim_entries[] = {
#define NVS_SIM_EXPORT(name, symbol, since, per_thread) {#name, #symbol, since, per_thread, symbol},
#include "entry/exports.def"
#undef NVS_SIM_EXPORT
};
const uint32_t nvs_sim_entry_count = sizeof nvs_sim_entries / sizeof *nvs_sim_entries;
