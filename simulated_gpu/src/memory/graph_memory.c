/* The addresses of graph memory: one for each node that allocates.  graph/exec_memory.c charges the memory. */
#include "memory/memory.h"

#include <stdlib.h>

static sim_graph_memory *memories;

size_t nvs_sim_graph_memory_charge(const sim_graph_memory *memory)
{
    return (memory->bytes + 511) / 512 * 512;
}

sim_graph_memory *nvs_sim_graph_memory_at(CUdeviceptr pointer)
{
    const sim_allocation *allocation = nvs_sim_find_base(pointer);
    return allocation != NULL && allocation->kind == MEM_GRAPH ? allocation->account.handle : NULL;
}

/* Queued work may use an address until the device is idle. */
void nvs_sim_graph_memory_collect(void)
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
        memory->device->graph_memory.attached -= nvs_sim_graph_memory_charge(memory);
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
    nvs_sim_graph_memory_collect();
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
