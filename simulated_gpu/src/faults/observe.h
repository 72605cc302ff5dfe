/* The driver's side of CUPTI: an observer learns of each call and of work that has ended. */
#ifndef SIM_OBSERVE_H
#define SIM_OBSERVE_H

#include "base/base.h"

const nvs_sim_observer *nvs_sim_current_observer(void); /* NULL: there is none */
void nvs_sim_observe_call(const char *function);        /* numbers the call and reports it to the observer, if there is one */
uint32_t nvs_sim_call_number(void);                     /* of the observed call that the thread is in, or was last in */
const char *nvs_sim_lasting_name(const char *name);     /* a copy that is never freed */
void nvs_sim_inject(void);                              /* loads the library that CUDA_INJECTION64_PATH names */

#endif
