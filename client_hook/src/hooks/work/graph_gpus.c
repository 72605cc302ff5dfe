/* See graph_gpus.h. */
#include "hooks/work/graph_gpus.h"

#include "base/log.h"
#include "inflight/marks.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { BUCKETS = 1024, TRIES = 3 };

typedef struct entry {
    struct entry *next;
    const void *graph;
    uint32_t gpus;
    bool apart; /* it counts in nvs_graphs_apart */
} entry;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* "GPUs of graphs" in the lock order of base/base.h */
static entry *buckets[BUCKETS];
NVS_FORK_STATE static bool any_entry; /* some bucket was ever written to */
NVS_FORK_STATE _Atomic uint32_t nvs_graphs_apart;

static entry **link_of(const void *graph)
{
    entry **link = &buckets[(uintptr_t)graph * UINT64_C(0x9e3779b97f4a7c15) >> 54]; /* Fibonacci hashing; 10 bits are left */
    while (*link != NULL && (*link)->graph != graph)
        link = &(*link)->next;
    return link;
}

uint32_t nvs_graph_gpus(const void *graph)
{
    pthread_mutex_lock(&lock);
    const entry *found = *link_of(graph);
    const uint32_t gpus = found != NULL ? found->gpus : 0;
    pthread_mutex_unlock(&lock);
    return gpus;
}

static void add(const void *graph, uint32_t gpus, bool apart)
{
    const int saved = errno;
    entry *fresh = calloc(1, sizeof *fresh);
    pthread_mutex_lock(&lock);
    entry **link = link_of(graph);
    if (*link == NULL && fresh != NULL) {
        fresh->graph = graph;
        *link = fresh;
        any_entry = true;
        fresh = NULL;
    }
    if (*link != NULL) {
        (*link)->gpus |= gpus;
        if (apart && !(*link)->apart)
            atomic_fetch_add_explicit(&nvs_graphs_apart, 1, memory_order_relaxed); /* see its declaration */
        (*link)->apart |= apart;
    }
    pthread_mutex_unlock(&lock);
    free(fresh);
    errno = saved;
}

void nvs_graph_runs_on(const void *graph, uint32_t gpus)
{
    if ((nvs_graph_gpus(graph) & gpus) != gpus)
        add(graph, gpus, false);
}

void nvs_graph_gone(const void *graph)
{
    pthread_mutex_lock(&lock);
    entry **link = link_of(graph), *gone = *link;
    if (gone != NULL) {
        *link = gone->next;
        if (gone->apart)
            atomic_fetch_sub_explicit(&nvs_graphs_apart, 1, memory_order_relaxed); /* as above */
    }
    pthread_mutex_unlock(&lock);
    free(gone);
}

uint32_t nvs_graph_ready(CUgraphExec ready, CUgraph graph, uint32_t current)
{
    const uint32_t gpus = nvs_graph_gpus(graph), here = current < NVS_MAX_GPUS ? 1u << current : 0;
    nvs_graph_gone(ready); /* another one's that had the same handle */
    if ((gpus & ~here) == 0)
        return 0;
    add(ready, gpus, true);
    return gpus;
}

static uint32_t others_than(uint32_t gpu, CUgraphExec ready)
{
    return gpu < NVS_MAX_GPUS ? nvs_graph_gpus(ready) & ~(1u << gpu) : 0;
}

nvs_slot *nvs_graph_enter_all(CUgraphExec ready, uint32_t gpu)
{
    const uint32_t others = others_than(gpu, ready);
    for (int tries = 0; others != 0 && tries < TRIES; tries++) {
        /* Waiting is done outside of all: who is inside of one gate and waits before another keeps a lease from being given back. */
        for (uint32_t each = 0; each < NVS_MAX_GPUS; each++)
            if ((others >> each & 1) != 0)
                nvs_gate_leave(nvs_gate_enter(each), each);
        nvs_slot *slot = nvs_gate_enter(gpu);
        if (slot == NULL || nvs_gate_also_enter(slot, others))
            return slot;
        nvs_gate_leave(slot, gpu);
    }
    if (others != 0)
        NVS_LOG_ONCE(NVS_LOG_INFO, "a graph on several GPUs is launched without the leases of all of them: their turns come at different "
                                   "times (start the program with --gang)");
    return nvs_gate_enter(gpu);
}

void nvs_graph_leave_all(nvs_slot *slot, CUgraphExec ready, const nvs_graph_launch *launch)
{
    const uint32_t others = launch->result == CUDA_SUCCESS ? others_than(launch->gpu, ready) : 0;
    if (others != 0) /* while their leases cannot be given back */
        nvs_mark_stream(others, launch->gpu, launch->stream, launch->per_thread);
    if (slot != NULL && atomic_load_explicit(&slot->also, memory_order_relaxed) != 0) /* written by this thread only */
        nvs_gate_also_leave(slot);
}

NVS_FORK_CODE void nvs_graphs_after_fork(void)
{
    pthread_mutex_init(&lock, NULL); /* a thread that does not exist here may have held it */
    if (any_entry)
        memset(buckets, 0, sizeof buckets); /* CUDA is not usable here */
    any_entry = false;
    atomic_store_explicit(&nvs_graphs_apart, 0, memory_order_relaxed);
}
