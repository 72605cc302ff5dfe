#include "sim.h"
bool nvs_sim_vmm_reserved(uintptr_t address, size_t bytes, bool *accessible) { return false; }
