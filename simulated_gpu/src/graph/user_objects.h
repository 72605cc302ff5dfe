/* What graphs keep of user objects. */
#ifndef SIM_USER_OBJECTS_H
#define SIM_USER_OBJECTS_H

#include "base/entry.h"

typedef struct sim_hold { /* references of a graph to a user object */
    struct sim_hold *next;
    struct sim_user_object *object;
    unsigned count;
} sim_hold;

void nvs_sim_holds_drop(sim_hold **holds);
CUresult nvs_sim_holds_copy(const sim_hold *from, sim_hold **to);
CUresult nvs_sim_hold_add(sim_hold **holds, CUuserObject object, unsigned count, bool moves); /* moves: a reference of the caller */
CUresult nvs_sim_hold_release(sim_hold **holds, CUuserObject object, unsigned count);

#endif
