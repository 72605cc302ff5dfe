/* Reports each call and each end of work to an observer. */
#ifndef SIM_OBSERVE_H
#define SIM_OBSERVE_H

#include "base/base.h"

const nvs_sim_observer *nvs_sim_current_observer(void); /* NULL: there is none */
void nvs_sim_observe_call(const char *function);        /* numbers the call and reports it to the observer, if there is one */
uint32_t nvs_sim_call_number(void);                     /* of the thread's present or last observed call */
const char *nvs_sim_lasting_name(const char *name);     /* a copy that is never freed */

#endif
