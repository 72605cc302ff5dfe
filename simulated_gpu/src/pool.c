#include "sim.h"
void nvs_sim_pool_freed(const sim_allocation *allocation) {}
