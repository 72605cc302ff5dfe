/* Used and reserved memory, with high marks. */
#include "device/device.h"

#include <string.h>

void nvs_sim_figures_set(sim_figures *figures, uint64_t used, uint64_t reserved)
{
    uint64_t *values = figures->values;
    values[SIM_USED] = used;
    values[SIM_RESERVED] = reserved;
    if (values[SIM_USED_HIGH] < used)
        values[SIM_USED_HIGH] = used;
    if (values[SIM_RESERVED_HIGH] < reserved)
        values[SIM_RESERVED_HIGH] = reserved;
}

CUresult nvs_sim_figures_reset(sim_figures *figures, enum sim_figure high, const void *value)
{
    uint64_t number;
    memcpy(&number, value, sizeof number);
    if (number != 0 || (high != SIM_USED_HIGH && high != SIM_RESERVED_HIGH))
        return CUDA_ERROR_INVALID_VALUE;
    figures->values[high] = figures->values[high - 1];
    return CUDA_SUCCESS;
}
