/* User objects: a destructor on the host that runs when the last reference has gone, those of graphs included. */
#include "graph/user_objects.h"

#include <stdlib.h>

typedef struct sim_user_object {
    uint32_t magic;
    unsigned references;
    void *value;
    CUhostFn destroy;
} sim_user_object;

static NVS_SIM_DEFINE_FIND(find, CUuserObject, sim_user_object, SIM_USER_OBJECT, CUDA_ERROR_INVALID_VALUE)

/* The destructor may not call CUDA. */
static void *destroy(void *argument)
{
    sim_user_object *object = argument;
    nvs_sim_thread.in_callback = true;
    object->destroy(object->value); /* the object stays, to recognise stale handles */
    return NULL;
}

static CUresult unreference(sim_user_object *object, unsigned count)
{
    NVS_SIM_CHECK(count != 0 && count <= object->references, CUDA_ERROR_INVALID_VALUE);
    if ((object->references -= count) != 0)
        return CUDA_SUCCESS;
    object->magic = 0;
    return nvs_sim_start_thread(destroy, object) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult reference(sim_user_object *object, unsigned count)
{
    NVS_SIM_CHECK(count != 0, CUDA_ERROR_INVALID_VALUE);
    object->references += count;
    return CUDA_SUCCESS;
}

/* Graphs. */

static CUresult hold(sim_hold **holds, sim_user_object *object, unsigned count)
{
    sim_hold *made = malloc(sizeof *made);
    NVS_SIM_CHECK(made != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *made = (sim_hold){.next = *holds, .object = object, .count = count};
    *holds = made;
    return CUDA_SUCCESS;
}

void nvs_sim_holds_drop(sim_hold **holds)
{
    while (*holds != NULL) {
        sim_hold *one = *holds;
        *holds = one->next;
        (void)unreference(one->object, one->count);
        free(one);
    }
}

CUresult nvs_sim_holds_copy(const sim_hold *from, sim_hold **to)
{
    for (; from != NULL; from = from->next) {
        NVS_SIM_TRY(hold(to, from->object, from->count));
        from->object->references += from->count;
    }
    return CUDA_SUCCESS;
}

CUresult nvs_sim_hold_add(sim_hold **holds, CUuserObject handle, unsigned count, bool moves)
{
    sim_user_object *object;
    NVS_SIM_TRY(find(handle, &object));
    NVS_SIM_CHECK(count != 0 && (!moves || count <= object->references), CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(hold(holds, object, count));
    return moves ? CUDA_SUCCESS : reference(object, count);
}

CUresult nvs_sim_hold_release(sim_hold **holds, CUuserObject handle, unsigned count)
{
    sim_user_object *object;
    NVS_SIM_TRY(find(handle, &object));
    while (*holds != NULL && ((*holds)->object != object || (*holds)->count < count))
        holds = &(*holds)->next;
    NVS_SIM_CHECK(*holds != NULL, CUDA_ERROR_INVALID_VALUE);
    sim_hold *one = *holds;
    if ((one->count -= count) == 0) {
        *holds = one->next;
        free(one);
    }
    return unreference(object, count);
}

/* Functions of the driver. */

SIM_EXPORT CUresult CUDAAPI cuUserObjectCreate(CUuserObject *object_out, void *ptr, CUhostFn destroy, unsigned int initialRefcount,
                                               unsigned int flags)
{
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(object_out != NULL && destroy != NULL && initialRefcount != 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(flags == CU_USER_OBJECT_NO_DESTRUCTOR_SYNC, CUDA_ERROR_INVALID_VALUE);
    sim_user_object *object = malloc(sizeof *object);
    NVS_SIM_CHECK(object != NULL, CUDA_ERROR_OUT_OF_MEMORY);
    *object = (sim_user_object){.magic = SIM_USER_OBJECT, .references = initialRefcount, .value = ptr, .destroy = destroy};
    *object_out = (CUuserObject)(void *)object;
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuUserObjectRetain(CUuserObject handle, unsigned int count)
{
    NVS_SIM_ENTER_FIND(sim_user_object *object, find(handle, &object));
    return reference(object, count);
}

SIM_EXPORT CUresult CUDAAPI cuUserObjectRelease(CUuserObject handle, unsigned int count)
{
    NVS_SIM_ENTER_FIND(sim_user_object *object, find(handle, &object));
    return unreference(object, count);
}
