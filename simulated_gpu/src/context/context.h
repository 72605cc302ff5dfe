/* Contexts as objects: opening and closing them. */
#ifndef SIM_CONTEXT_H
#define SIM_CONTEXT_H

#include "graph/graph.h"

/* lifecycle.c */
sim_context *nvs_sim_context_new(void);
void nvs_sim_context_free(sim_context *context); /* its memory stays readable */
CUresult nvs_sim_context_open(sim_context *context, sim_device *device, unsigned flags);
void nvs_sim_context_close(sim_context *context);

/* primary.c */
bool nvs_sim_primary_reopen(sim_device *device);
CUresult nvs_sim_primary_retain(sim_device *device, sim_context **out);
CUresult nvs_sim_primary_release(sim_device *device, bool reset);

#endif
