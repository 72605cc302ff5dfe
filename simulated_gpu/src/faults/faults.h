/* Injected faults, asked for before each call; the tests' own interface is in simulated_gpu.h. */
#ifndef SIM_FAULTS_H
#define SIM_FAULTS_H

#include "base/base.h"

CUresult nvs_sim_fault(const char *function); /* counts the call; waits if a rule delays it; the result that a rule demands */
bool nvs_sim_is_missing(const char *function);
void nvs_sim_faults_from_environment(void);

#endif
