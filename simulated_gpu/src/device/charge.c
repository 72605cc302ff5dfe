/* The use of a card by this process, in the shared file: memory, contexts, and the trace of its work. */
#include "device/device.h"

#include <string.h>

nvs_sim_process *nvs_sim_self;

/* With the shared lock.  Pages out managed memory: first that of other processes, from the largest on, then that of this process. */
static bool make_room(nvs_sim_process *own, uint32_t gpu, uint64_t bytes)
{
    nvs_sim_shared *shared = nvs_sim_shared_state;
    uint64_t capacity = shared->gpus[gpu].capacity_bytes;
    uint64_t used = nvs_sim_shared_used(shared, gpu);
    if (used + bytes > capacity) {
        nvs_sim_shared_reap(shared);
        used = nvs_sim_shared_used(shared, gpu);
    }
    while (used + bytes > capacity) {
        nvs_sim_process *victim = NULL;
        for (uint32_t i = 0; i < shared->processes_used; i++) {
            nvs_sim_process *process = &shared->processes[i];
            if (process->process_id != 0 && process != own && process->paged_bytes[gpu] != 0 &&
                (victim == NULL || process->paged_bytes[gpu] > victim->paged_bytes[gpu]))
                victim = process;
        }
        if (victim == NULL && own->paged_bytes[gpu] != 0)
            victim = own;
        if (victim == NULL)
            return false;
        uint64_t missing = used + bytes - capacity;
        uint64_t taken = missing < victim->paged_bytes[gpu] ? missing : victim->paged_bytes[gpu];
        victim->paged_bytes[gpu] -= taken;
        used -= taken;
    }
    return true;
}

bool nvs_sim_charge(uint32_t gpu, uint64_t bytes)
{
    nvs_sim_process *own = nvs_sim_self;
    if (bytes > nvs_sim_shared_state->gpus[gpu].capacity_bytes)
        return false;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    const bool room = make_room(own, gpu, bytes);
    if (room)
        own->fixed_bytes[gpu] += bytes;
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return room;
}

void nvs_sim_uncharge(uint32_t gpu, uint64_t bytes)
{
    nvs_sim_process *own = nvs_sim_self;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    own->fixed_bytes[gpu] -= bytes;
    nvs_sim_shared_unlock(nvs_sim_shared_state);
}

uint64_t nvs_sim_page_in(uint32_t gpu, uint64_t bytes)
{
    nvs_sim_process *own = nvs_sim_self;
    uint64_t capacity = nvs_sim_shared_state->gpus[gpu].capacity_bytes;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    /* Paging in never pages out other memory of the same process. */
    uint64_t held = own->paged_bytes[gpu], fixed = own->fixed_bytes[gpu];
    uint64_t most = capacity > held + fixed ? capacity - held - fixed : 0;
    if (bytes > most)
        bytes = most;
    own->paged_bytes[gpu] = 0; /* make_room then leaves this process alone */
    if (!make_room(own, gpu, held + bytes)) {
        nvs_sim_shared_reap(nvs_sim_shared_state);
        uint64_t used = nvs_sim_shared_used(nvs_sim_shared_state, gpu) + held;
        bytes = used < capacity ? capacity - used : 0;
    }
    own->paged_bytes[gpu] = held + bytes;
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return bytes;
}

void nvs_sim_page_out(uint32_t gpu, uint64_t bytes)
{
    nvs_sim_process *own = nvs_sim_self;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    own->paged_bytes[gpu] -= bytes < own->paged_bytes[gpu] ? bytes : own->paged_bytes[gpu];
    nvs_sim_shared_unlock(nvs_sim_shared_state);
}

uint64_t nvs_sim_paged(uint32_t gpu)
{
    nvs_sim_process *own = nvs_sim_self;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    uint64_t bytes = own->paged_bytes[gpu];
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return bytes;
}

uint64_t nvs_sim_free(uint32_t gpu)
{
    uint64_t capacity = nvs_sim_shared_state->gpus[gpu].capacity_bytes;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    nvs_sim_shared_reap(nvs_sim_shared_state);
    uint64_t used = nvs_sim_shared_used(nvs_sim_shared_state, gpu);
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return used < capacity ? capacity - used : 0;
}

void nvs_sim_attach(uint32_t gpu, int change)
{
    nvs_sim_process *own = nvs_sim_self;
    nvs_sim_shared_lock(nvs_sim_shared_state);
    own->attached[gpu] += (uint64_t)(int64_t)change;
    nvs_sim_shared_unlock(nvs_sim_shared_state);
}

void nvs_sim_trace(uint32_t gpu, const nvs_sim_record *work)
{
    nvs_sim_shared *shared = nvs_sim_shared_state;
    nvs_sim_process *own = nvs_sim_self;
    own->busy_ns[gpu] += work->work_ns;
    /* Relaxed: the sequence of the record publishes it. */
    uint64_t number = atomic_fetch_add_explicit(&shared->trace_next, 1, memory_order_relaxed);
    nvs_sim_record *record = &nvs_sim_shared_records(shared)[number % shared->trace_records];
    atomic_store_explicit(&record->sequence, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* a reader that sees a new field also sees the zero */
    record->start_ns = work->start_ns;
    record->end_ns = work->end_ns;
    record->stream = work->stream;
    record->bytes = work->bytes;
    record->work_ns = work->work_ns;
    record->process_id = own->process_id;
    record->gpu = (uint16_t)gpu;
    record->kind = work->kind;
    /* Release: pairs with the reader, which accepts a record only with the sequence of its position. */
    atomic_store_explicit(&record->sequence, number + 1, memory_order_release);
}

/* Used and reserved memory of a pool, or of the graphs of a device. */
void nvs_sim_figures_set(sim_figures *figures, uint64_t used, uint64_t reserved)
{
    uint64_t *values = figures->values;
    values[SIM_USED] = used;
    values[SIM_RESERVED] = reserved;
    if (values[SIM_USED_HIGH] < used)
        values[SIM_USED_HIGH] = used;
    if (values[SIM_RESERVED_HIGH] < reserved)
        values[SIM_RESERVED_HIGH] = reserved;
}

CUresult nvs_sim_figures_reset(sim_figures *figures, enum sim_figure high, const void *value)
{
    uint64_t number;
    memcpy(&number, value, sizeof number);
    if (number != 0 || (high != SIM_USED_HIGH && high != SIM_RESERVED_HIGH))
        return CUDA_ERROR_INVALID_VALUE;
    figures->values[high] = figures->values[high - 1];
    return CUDA_SUCCESS;
}
