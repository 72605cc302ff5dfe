/* Memory that graphs allocate, as a driver 580 keeps it (measured).
 *
 * A node reserves an address and nothing else.  The card gives memory at the first upload or launch of an executable: as much as
 * its nodes need at once, in the order in which they run.  The memory stays the executable's between launches; when the executable
 * is destroyed, the device keeps the memory for later executables.  cuDeviceGraphMemTrim gives back what no executable runs with
 * and no unfreed allocation lies in.  An allocation that the graph does not free outlives graph and executable.
 *
 * The two figures of a device, used and reserved, were never seen to differ.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

struct sim_graph_memory {
    struct sim_graph_memory *next; /* all of them */
    CUdeviceptr pointer;           /* 0: its context has ended */
    size_t bytes;
    sim_device *device;
    uint32_t nodes;   /* that allocate it, those of executables included */
    bool live;        /* allocated by a launch, and not freed */
    bool left_behind; /* live, and its executable is gone */
};

static sim_graph_memory *memories;
static sim_graph_hold *holds;

static size_t charge_of(const sim_graph_memory *memory)
{
    return (memory->bytes + 511) / 512 * 512;
}

sim_graph_memory *nvs_sim_graph_memory_at(CUdeviceptr pointer)
{
    const sim_allocation *allocation = nvs_sim_find((uintptr_t)pointer);
    return allocation != NULL && allocation->kind == MEM_GRAPH && allocation->base == (uintptr_t)pointer ? allocation->handle : NULL;
}

/* Addresses that nothing names any more; queued work may use them until the device is idle. */
static void collect(void)
{
    for (sim_graph_memory **link = &memories, *memory; (memory = *link) != NULL;) {
        if (memory->nodes != 0 || memory->live || (memory->pointer != 0 && memory->device->busy != NULL)) {
            link = &memory->next;
            continue;
        }
        *link = memory->next;
        if (memory->pointer != 0)
            nvs_sim_release((uintptr_t)memory->pointer);
        free(memory);
    }
}

CUresult nvs_sim_graph_memory_new(sim_context *context, size_t bytes, sim_graph_memory **out)
{
    collect();
    sim_graph_memory *memory = calloc(1, sizeof *memory);
    CUresult result = memory == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_sim_allocate(context, bytes, MEM_GRAPH, 0, &memory->pointer);
    if (result != CUDA_SUCCESS) {
        free(memory);
        return result;
    }
    memory->bytes = bytes;
    memory->device = context->device;
    memory->nodes = 1;
    memory->next = memories;
    memories = memory;
    nvs_sim_find((uintptr_t)memory->pointer)->handle = memory;
    *out = memory;
    return CUDA_SUCCESS;
}

CUdeviceptr nvs_sim_graph_memory_pointer(const sim_graph_memory *memory) { return memory->pointer; }
void nvs_sim_graph_memory_ref(sim_graph_memory *memory) { memory->nodes++; }
void nvs_sim_graph_memory_unref(sim_graph_memory *memory) { memory->nodes--; }

bool nvs_sim_graph_memory_free(sim_graph_memory *memory)
{
    const bool was = memory->live;
    if (memory->left_behind)
        memory->device->graph_attached -= charge_of(memory);
    memory->live = memory->left_behind = false;
    return was;
}

void nvs_sim_graph_memory_gone(const sim_allocation *allocation)
{
    sim_graph_memory *memory = allocation->handle;
    (void)nvs_sim_graph_memory_free(memory);
    memory->pointer = 0;
}

/* --- executables --- */

/* As much as is allocated at once by nodes in this order. */
static uint64_t most(sim_node *const *order, size_t count)
{
    uint64_t now = 0, high = 0;
    for (size_t i = 0; i < count; i++) {
        if (order[i]->memory != NULL)
            now += charge_of(order[i]->memory);
        for (size_t k = 0; order[i]->type == CU_GRAPH_NODE_TYPE_MEM_FREE && k < i; k++)
            if (order[k]->memory != NULL && order[k]->memory->pointer == order[i]->work.u.pointer)
                now -= charge_of(order[k]->memory);
        high = now > high ? now : high;
    }
    return high;
}

bool nvs_sim_graph_allocates(const sim_graph *graph)
{
    bool found = false;
    for (const sim_node *node = graph->nodes; node != NULL; node = node->next)
        found = found || node->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || node->type == CU_GRAPH_NODE_TYPE_MEM_FREE;
    return found;
}

CUresult nvs_sim_graph_hold(sim_graph_hold *hold, const sim_graph *of, sim_node *const *order, size_t count)
{
    for (const sim_graph_hold *other = holds; other != NULL && nvs_sim_graph_allocates(of); other = other->next)
        if (other->origin == of->id)
            return CUDA_ERROR_NOT_SUPPORTED; /* one executable at a time */
    *hold = (sim_graph_hold){.next = holds, .origin = of->id, .order = order, .count = count, .bytes = most(order, count)};
    for (size_t i = 0; i < count && hold->device == NULL; i++)
        hold->device = order[i]->memory != NULL ? order[i]->memory->device : NULL;
    holds = hold;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_graph_attach(sim_graph_hold *hold)
{
    sim_device *device = hold->device;
    if (device == NULL || hold->attached)
        return CUDA_SUCCESS;
    const uint64_t kept = device->graph_bytes - device->graph_attached, missing = hold->bytes > kept ? hold->bytes - kept : 0;
    if (missing != 0 && !nvs_sim_charge(device->gpu, missing))
        return CUDA_ERROR_OUT_OF_MEMORY;
    device->graph_bytes += missing;
    device->graph_attached += hold->bytes;
    for (int i = 0; i < 2; i++)
        if (device->graph_high[i] < device->graph_bytes)
            device->graph_high[i] = device->graph_bytes;
    return hold->attached = true, CUDA_SUCCESS;
}

static bool has_live(const sim_graph_hold *hold)
{
    bool live = false;
    for (size_t i = 0; i < hold->count; i++)
        live = live || (hold->order[i]->memory != NULL && hold->order[i]->memory->live);
    return live;
}

void nvs_sim_graph_release(sim_graph_hold *hold)
{
    sim_graph_hold **link = &holds;
    while (*link != NULL && *link != hold)
        link = &(*link)->next;
    if (*link == NULL)
        return; /* it was never instantiated */
    *link = hold->next;
    if (!hold->attached)
        return;
    hold->device->graph_attached -= hold->bytes;
    for (size_t i = 0; i < hold->count; i++) {
        sim_graph_memory *memory = hold->order[i]->memory;
        if (memory == NULL || !memory->live)
            continue;
        memory->left_behind = true;
        memory->device->graph_attached += charge_of(memory);
    }
}

CUresult nvs_sim_graph_allocate(sim_graph_hold *hold, bool frees_first)
{
    if (!frees_first && has_live(hold))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_graph_attach(hold);
    for (size_t i = 0; i < hold->count && result == CUDA_SUCCESS; i++) {
        if (hold->order[i]->memory != NULL)
            hold->order[i]->memory->live = true;
        sim_graph_memory *freed = hold->order[i]->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? nvs_sim_graph_memory_at(hold->order[i]->work.u.pointer) : NULL;
        if (freed != NULL)
            (void)nvs_sim_graph_memory_free(freed);
    }
    return result;
}

/* --- the device's part --- */

static void trim(sim_device *device)
{
    for (sim_graph_hold *hold = holds; hold != NULL && device->busy == NULL; hold = hold->next) {
        if (hold->device != device || !hold->attached || has_live(hold))
            continue;
        device->graph_attached -= hold->bytes;
        hold->attached = false;
    }
    nvs_sim_uncharge(device->gpu, device->graph_bytes - device->graph_attached);
    device->graph_bytes = device->graph_attached;
    collect();
}

void nvs_sim_graph_context_gone(sim_device *device)
{
    if (device->graph_bytes != 0)
        trim(device);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device)
{
    sim_device *found;
    NVS_SIM_ENTER();
    NVS_SIM_TRY(nvs_sim_device(device, &found));
    if (found->graph_bytes != 0)
        trim(found);
    return nvs_sim_return(CUDA_SUCCESS);
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
    sim_device *found;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(device, &found));
    switch (attr) {
    case CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT:
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT: memcpy(value, &found->graph_bytes, sizeof found->graph_bytes); break;
    case CU_GRAPH_MEM_ATTR_USED_MEM_HIGH: memcpy(value, &found->graph_high[0], sizeof found->graph_high[0]); break;
    case CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH: memcpy(value, &found->graph_high[1], sizeof found->graph_high[1]); break;
    default: return nvs_sim_return(CUDA_ERROR_INVALID_VALUE);
    }
    return nvs_sim_return(CUDA_SUCCESS);
}

/* A high mark starts again from what there is; no other value than 0 may be given. */
SIM_EXPORT CUresult CUDAAPI cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
    sim_device *found;
    uint64_t number;
    NVS_SIM_ENTER();
    NVS_SIM_CHECK(value != NULL, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_TRY(nvs_sim_device(device, &found));
    memcpy(&number, value, sizeof number);
    NVS_SIM_CHECK(number == 0, CUDA_ERROR_INVALID_VALUE);
    NVS_SIM_CHECK(attr == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH, CUDA_ERROR_INVALID_VALUE);
    found->graph_high[attr == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = found->graph_bytes;
    return nvs_sim_return(CUDA_SUCCESS);
}
