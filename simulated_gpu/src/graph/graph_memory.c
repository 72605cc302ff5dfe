/* Memory that graphs allocate, by the rules of driver 580 (measured).
 *
 * A node reserves only an address.  The first upload or launch of an executable takes memory of the card: the peak of the allocations
 * of its nodes, in the order in which they run.  The executable keeps the memory between launches; after its end the device keeps the
 * memory for later executables.  cuDeviceGraphMemTrim releases memory without an executable and without live allocations.
 * An allocation that the graph does not free outlives the graph and the executable.
 *
 * The used and the reserved bytes of a device never differed in measurements.
 */
#include "graph/graph.h"

#include <stdlib.h>
#include <string.h>

static sim_graph_memory *memories;

static size_t charge_of(const sim_graph_memory *memory)
{
    return (memory->bytes + 511) / 512 * 512;
}

sim_graph_memory *nvs_sim_graph_memory_at(CUdeviceptr pointer)
{
    const sim_allocation *allocation = nvs_sim_find_base(pointer);
    return allocation != NULL && allocation->kind == MEM_GRAPH ? allocation->account.handle : NULL;
}

/* Releases unused addresses.  Queued work may use an address until the device is idle. */
static void collect(void)
{
    for (sim_graph_memory **link = &memories, *memory; (memory = *link) != NULL;) {
        if (memory->nodes != 0 || memory->live || (memory->pointer != 0 && memory->device->executor.busy != NULL)) {
            link = &memory->next;
            continue;
        }
        *link = memory->next;
        if (memory->pointer != 0)
            nvs_sim_release((uintptr_t)memory->pointer);
        free(memory);
    }
}

bool nvs_sim_graph_memory_free(sim_graph_memory *memory)
{
    const bool was = memory->live;
    if (memory->orphan)
        memory->device->graph_memory.attached -= charge_of(memory);
    memory->live = memory->orphan = false;
    return was;
}

static void released(const sim_allocation *allocation)
{
    sim_graph_memory *memory = allocation->account.handle;
    (void)nvs_sim_graph_memory_free(memory);
    memory->pointer = 0;
}

CUresult nvs_sim_graph_memory_new(sim_context *context, size_t bytes, uint64_t accessors, sim_graph_memory **out)
{
    collect();
    sim_graph_memory *memory = calloc(1, sizeof *memory);
    CUresult result = memory == NULL ? CUDA_ERROR_OUT_OF_MEMORY : nvs_sim_allocate(context, bytes, MEM_GRAPH, &memory->pointer);
    if (result != CUDA_SUCCESS) {
        free(memory);
        return result;
    }
    *memory = (sim_graph_memory){.next = memories, .pointer = memory->pointer, .bytes = bytes, .device = context->device, .nodes = 1};
    memories = memory;
    sim_allocation *allocation = nvs_sim_find_base(memory->pointer);
    allocation->accessed_by = accessors;
    allocation->account = (sim_account){.handle = memory, .released = released};
    *out = memory;
    return CUDA_SUCCESS;
}

/* The memory of executables. */

static sim_exec_memory *executables;

/* Bytes that the card has given to graphs. */
static uint64_t given(const sim_device *device) { return device->graph_memory.figures.values[SIM_USED]; }

/* The peak of the allocations of the nodes, in this order. */
static uint64_t peak(sim_node *const *order, size_t count)
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

CUresult nvs_sim_exec_memory_open(sim_exec_memory *memory, const sim_graph *of, sim_node *const *order, size_t count)
{
    for (const sim_exec_memory *other = executables; other != NULL && nvs_sim_graph_allocates(of); other = other->next)
        if (other->origin == of->id)
            return CUDA_ERROR_NOT_SUPPORTED; /* a graph that allocates can have only one executable */
    *memory = (sim_exec_memory){.next = executables, .origin = of->id, .order = order, .count = count, .bytes = peak(order, count)};
    for (size_t i = 0; i < count && memory->device == NULL; i++)
        memory->device = order[i]->memory != NULL ? order[i]->memory->device : NULL;
    executables = memory;
    return CUDA_SUCCESS;
}

CUresult nvs_sim_exec_memory_attach(sim_exec_memory *memory)
{
    sim_device *device = memory->device;
    if (device == NULL || memory->attached)
        return CUDA_SUCCESS;
    const uint64_t bytes = given(device), spare = bytes - device->graph_memory.attached;
    const uint64_t missing = memory->bytes > spare ? memory->bytes - spare : 0;
    if (missing != 0 && !nvs_sim_charge(device->gpu, missing))
        return CUDA_ERROR_OUT_OF_MEMORY;
    nvs_sim_figures_set(&device->graph_memory.figures, bytes + missing, bytes + missing);
    device->graph_memory.attached += memory->bytes;
    memory->attached = true;
    return CUDA_SUCCESS;
}

static bool has_live(const sim_exec_memory *memory)
{
    bool live = false;
    for (size_t i = 0; i < memory->count; i++)
        live = live || (memory->order[i]->memory != NULL && memory->order[i]->memory->live);
    return live;
}

void nvs_sim_exec_memory_close(sim_exec_memory *memory)
{
    sim_exec_memory **link = &executables;
    while (*link != NULL && *link != memory)
        link = &(*link)->next;
    if (*link == NULL)
        return; /* the instantiation failed before nvs_sim_exec_memory_open */
    *link = memory->next;
    if (!memory->attached)
        return;
    memory->device->graph_memory.attached -= memory->bytes;
    for (size_t i = 0; i < memory->count; i++) {
        sim_graph_memory *part = memory->order[i]->memory;
        if (part == NULL || !part->live)
            continue;
        part->orphan = true;
        part->device->graph_memory.attached += charge_of(part);
    }
}

CUresult nvs_sim_exec_memory_allocate(sim_exec_memory *memory, bool frees_first)
{
    if (!frees_first && has_live(memory))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = nvs_sim_exec_memory_attach(memory);
    for (size_t i = 0; i < memory->count && result == CUDA_SUCCESS; i++) {
        if (memory->order[i]->memory != NULL)
            memory->order[i]->memory->live = true;
        const sim_node *node = memory->order[i];
        sim_graph_memory *freed = node->type == CU_GRAPH_NODE_TYPE_MEM_FREE ? nvs_sim_graph_memory_at(node->work.u.pointer) : NULL;
        if (freed != NULL)
            (void)nvs_sim_graph_memory_free(freed);
    }
    return result;
}

void nvs_sim_graph_memory_trim(sim_device *device)
{
    if (given(device) == 0)
        return;
    for (sim_exec_memory *memory = executables; memory != NULL && device->executor.busy == NULL; memory = memory->next) {
        if (memory->device != device || !memory->attached || has_live(memory))
            continue;
        device->graph_memory.attached -= memory->bytes;
        memory->attached = false;
    }
    nvs_sim_uncharge(device->gpu, given(device) - device->graph_memory.attached);
    nvs_sim_figures_set(&device->graph_memory.figures, device->graph_memory.attached, device->graph_memory.attached);
    collect();
}

SIM_EXPORT CUresult CUDAAPI cuDeviceGraphMemTrim(CUdevice device)
{
    NVS_SIM_ENTER_FIND(sim_device *found, nvs_sim_device(device, &found));
    nvs_sim_graph_memory_trim(found);
    return CUDA_SUCCESS;
}

static const enum sim_figure figure_of[SIM_FIGURES] = {
    [CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT] = SIM_USED,
    [CU_GRAPH_MEM_ATTR_USED_MEM_HIGH] = SIM_USED_HIGH,
    [CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT] = SIM_RESERVED,
    [CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH] = SIM_RESERVED_HIGH,
};

SIM_EXPORT CUresult CUDAAPI cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
    NVS_SIM_ENTER_FIND(sim_device *found, nvs_sim_device(device, &found));
    NVS_SIM_CHECK(value != NULL && (unsigned)attr < SIM_FIGURES, CUDA_ERROR_INVALID_VALUE);
    memcpy(value, &found->graph_memory.figures.values[figure_of[attr]], sizeof(uint64_t));
    return CUDA_SUCCESS;
}

SIM_EXPORT CUresult CUDAAPI cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attr, void *value)
{
    NVS_SIM_ENTER_FIND(sim_device *found, nvs_sim_device(device, &found));
    NVS_SIM_CHECK(value != NULL && (unsigned)attr < SIM_FIGURES, CUDA_ERROR_INVALID_VALUE);
    return nvs_sim_figures_reset(&found->graph_memory.figures, figure_of[attr], value);
}
