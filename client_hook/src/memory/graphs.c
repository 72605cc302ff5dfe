/* The memory that executable graphs allocate (memory.h).  The registry has an entry for each executable and GPU. */
#include "memory/memory.h"

#include "contexts/context.h"
#include "driver/cuda_api.h"
#include "memory/backend.h"
#include "memory/quota.h"

#include <errno.h>
#include <stdlib.h>

/* --- the memory that a graph allocates --- */

typedef struct allocated { /* by a node */
    CUdeviceptr pointer; /* 0: a free place */
    uint64_t bytes;      /* 0: it is freed */
    uint32_t gpu;
} allocated;

typedef struct need { /* of a graph */
    uint64_t now[NVS_MAX_GPUS], most[NVS_MAX_GPUS];
    allocated *table;
    size_t mask;
} need;

static allocated *place_of(const need *of, CUdeviceptr pointer)
{
    size_t i = pointer * UINT64_C(0x9e3779b97f4a7c15) >> 32 & of->mask; /* Fibonacci hashing */
    while (of->table[i].pointer != 0 && of->table[i].pointer != pointer)
        i = (i + 1) & of->mask;
    return &of->table[i];
}

static void free_one(need *of, CUdeviceptr pointer)
{
    allocated *place = place_of(of, pointer);
    of->now[place->gpu] -= place->bytes;
    place->bytes = 0;
}

static void add_node(need *of, CUgraphNode node)
{
    CUgraphNodeType type;
    CUDA_MEM_ALLOC_NODE_PARAMS params;
    CUdeviceptr pointer;
    if (NVS_REAL(cuGraphNodeGetType)(node, &type) != CUDA_SUCCESS)
        return;
    if (type == CU_GRAPH_NODE_TYPE_MEM_FREE && NVS_REAL(cuGraphMemFreeNodeGetParams)(node, &pointer) == CUDA_SUCCESS)
        free_one(of, pointer);
    if (type != CU_GRAPH_NODE_TYPE_MEM_ALLOC || NVS_REAL(cuGraphMemAllocNodeGetParams)(node, &params) != CUDA_SUCCESS)
        return;
    const uint32_t gpu = (uint32_t)params.poolProps.location.id;
    if (params.poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE || gpu >= NVS_MAX_GPUS)
        return;
    free_one(of, params.dptr); /* an address may serve again in one graph */
    *place_of(of, params.dptr) = (allocated){params.dptr, nvs_memory_grains(params.bytesize), gpu};
    of->now[gpu] += nvs_memory_grains(params.bytesize);
    if (of->most[gpu] < of->now[gpu])
        of->most[gpu] = of->now[gpu];
}

/* The most that is allocated at once if the nodes run in the order in which they were made, which is that of the driver's list.  False: not known. */
static bool look_through(CUgraph graph, need *of)
{
    size_t count = 0;
    if (graph == NULL || NVS_REAL(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || count == 0 || count > SIZE_MAX / 64)
        return false;
    for (of->mask = 15; of->mask < 2 * count; of->mask = 2 * of->mask + 1) {
    }
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    of->table = calloc(of->mask + 1, sizeof *of->table);
    const bool listed = nodes != NULL && of->table != NULL && NVS_REAL(cuGraphGetNodes)(graph, nodes, &count) == CUDA_SUCCESS;
    for (size_t i = 0; listed && i < count; i++)
        add_node(of, nodes[i]);
    free(nodes);
    free(of->table);
    return listed;
}

/* --- executables --- */

static uint64_t key_of(CUgraphExec ready, uint32_t gpu)
{
    return (uint64_t)(uintptr_t)ready * NVS_MAX_GPUS + gpu;
}

static CUresult admit(const need *of, nvs_allocation **held)
{
    CUresult result = CUDA_SUCCESS;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS && result == CUDA_SUCCESS; gpu++) {
        nvs_allocation *entry;
        if (of->most[gpu] == 0 || !nvs_memory_manages(gpu))
            continue;
        nvs_graph_memory_learn(gpu);
        result = nvs_pins_admit(NVS_SPACE_EXECUTABLE, NVS_MEMORY_GRAPH, gpu, of->most[gpu], &entry);
        if (result != CUDA_SUCCESS)
            break;
        entry->context = nvs_owner_context();
        entry->node.next = *held;
        *held = entry;
    }
    if (result != CUDA_SUCCESS) {
        nvs_memory_drop_all(*held);
        *held = NULL;
    }
    return result;
}

CUresult nvs_graph_memory_admit(CUgraph graph, nvs_allocation **held)
{
    const int saved = errno;
    need of = {.table = NULL};
    *held = NULL;
    const CUresult result = nvs_any_graph_allocates() && look_through(graph, &of) ? admit(&of, held) : CUDA_SUCCESS;
    errno = saved;
    return result;
}

void nvs_graph_memory_keep(CUgraphExec made, nvs_allocation *held)
{
    for (nvs_allocation *entry = held, *next; entry != NULL; entry = next) {
        const uint32_t gpu = entry->gpu;
        next = entry->node.next;
        entry->node.next = NULL;
        if (made != NULL)
            nvs_memory_keep(entry, key_of(made, gpu), 1);
        else
            nvs_memory_drop(entry);
        nvs_graph_memory_learn(gpu);
    }
}

nvs_allocation *nvs_graph_memory_take(CUgraphExec ready)
{
    nvs_allocation *held = NULL, *entry;
    for (uint32_t gpu = 0; nvs_any_graph_allocates() && nvs_context_possible(gpu); gpu++)
        if (nvs_allocation_take(NVS_SPACE_EXECUTABLE, key_of(ready, gpu), &entry) == NVS_FOUND) {
            entry->node.next = held;
            held = entry;
        }
    return held;
}
