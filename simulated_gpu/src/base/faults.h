/* Injected faults, checked before each call, and the observer.  The interface for tests is in simulated_gpu.h. */
#ifndef SIM_FAULTS_H
#define SIM_FAULTS_H

#include "base/base.h"

CUresult nvs_sim_fault(const char *function); /* counts the call, delays it if a rule says so, and returns the result of a rule */
void nvs_sim_faults_from_environment(void);
void nvs_sim_observe_call(const char *function);

#endif
