/* Injected faults, checked before each call, and the observer.  The interface for tests is in simulated_gpu.h. */
#ifndef SIM_FAULTS_H
#define SIM_FAULTS_H

#include "base/base.h"

CUresult nvs_sim_fault(const char *function); /* counts the call, delays it if a rule says so, and returns the result of a rule */
bool nvs_sim_is_missing(const char *function);
void nvs_sim_faults_from_environment(void);

const nvs_sim_observer *nvs_sim_current_observer(void); /* NULL: there is none */
void nvs_sim_observe_call(const char *function);        /* numbers the call and reports it to the observer, if there is one */
uint32_t nvs_sim_call_number(void);                     /* of the thread's present or last observed call */
const char *nvs_sim_lasting_name(const char *name);     /* a copy that is never freed */

#endif
