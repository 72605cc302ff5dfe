/* The ends of running kernels: time slices of programs on a GPU, and the multiprocessors of the clients of MPS.
 *
 * A program is a process, or all clients of MPS together.  It claims a slice that lasts until the end of its known work.  A claim by
 * another program cuts the slice: to the length of a slice, or to the present time if the slice is already longer.  The switch then
 * costs switch_ns.  A program that runs alone is never cut, and a program without work has no slice.  A slice with a successor does
 * not change any more, so the slice of a dead process ends normally.
 * The clock of a program runs in its slices, and kernels end by that clock.  For clients of MPS the clock is slower than real time if
 * their demands exceed the multiprocessors: clients of normal priority share the multiprocessors in proportion to their demands,
 * clients of lower priority share the rest.
 * The kernels of one process run concurrently, each at full speed.  Work that is not a kernel is not slowed by kernels, as copy
 * engines are not.
 * Slices are in the shared file.  Functions here expect its lock, unless stated otherwise.
 */
#include "stream/stream.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

static uint64_t scaled(uint64_t value, uint64_t by, uint64_t over) { return value / over * by + value % over * by / over; }

static nvs_sim_slicer *slicer(const sim_device *device) { return &nvs_sim_shared_state->slicers[device->gpu]; }

static nvs_sim_program *program(const sim_device *device)
{
    return nvs_sim_settings.mps.client ? &slicer(device)->clients : &nvs_sim_self->programs[device->gpu];
}

static void wake(nvs_sim_process *process, uint32_t gpu)
{
    /* Release: pairs with the load in nvs_sim_wakes. */
    atomic_fetch_add_explicit(&process->wake[gpu], 1, memory_order_release);
    syscall(SYS_futex, &process->wake[gpu], FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void wake_clients(uint32_t gpu)
{
    nvs_sim_shared *shared = nvs_sim_shared_state;
    for (uint32_t i = 0; i < shared->processes_used; i++)
        if (shared->processes[i].demand[gpu] != 0 && &shared->processes[i] != nvs_sim_self)
            wake(&shared->processes[i], gpu);
}

static uint64_t clock_of(const nvs_sim_program *own, uint32_t priority, uint64_t real_ns)
{
    uint64_t until = real_ns < own->slice_end_ns ? real_ns : own->slice_end_ns;
    return own->clock_ns[priority] + (until > own->since_ns ? scaled(until - own->since_ns, own->rate[priority], SIM_WHOLE) : 0);
}

/* The clock of this process's kernels, which runs in its slices only. */
static uint64_t clock_at(const sim_device *device, uint64_t real_ns)
{
    return clock_of(program(device), nvs_sim_self->mps_priority, real_ns);
}

static bool clock_covers(const sim_device *device, uint64_t clock_ns) { return clock_ns <= clock_at(device, UINT64_MAX); }

/* The real time at which the clock reaches clock_ns if the slice lasts.  The rate must not be 0. */
static uint64_t real_at(const nvs_sim_program *own, uint32_t priority, uint64_t clock_ns)
{
    uint64_t rate = own->rate[priority], missing = clock_ns > own->clock_ns[priority] ? clock_ns - own->clock_ns[priority] : 0;
    uint64_t whole = missing / rate * SIM_WHOLE, rest = missing % rate * SIM_WHOLE;
    return own->since_ns + whole + (rest + rate - 1) / rate;
}

/* Real time; UINT64_MAX: not in the present slice. */
static uint64_t clock_end(const sim_device *device, uint64_t clock_ns)
{
    const uint32_t priority = nvs_sim_self->mps_priority;
    const nvs_sim_program *own = program(device);
    if (own->rate[priority] == 0 || !clock_covers(device, clock_ns))
        return UINT64_MAX;
    return real_at(own, priority, clock_ns);
}

/* The program with the last slice; NULL: none yet, or its process is dead. */
static nvs_sim_program *last_program(const sim_device *device, nvs_sim_process **process)
{
    nvs_sim_slicer *slices = slicer(device);
    *process = NULL;
    if (slices->last == NVS_SIM_MAX_PROCESSES)
        return &slices->clients;
    *process = &nvs_sim_shared_state->processes[slices->last];
    bool same = slices->last_process_id != 0 && (*process)->process_id == slices->last_process_id;
    return same ? &(*process)->programs[device->gpu] : NULL;
}

/* Cuts the slice of the last program, and returns the earliest start of the next slice. */
static uint64_t end_of_last(sim_device *device, nvs_sim_program *last, nvs_sim_process *process, uint64_t now_ns)
{
    uint64_t cut_ns = last->slice_start_ns + nvs_sim_settings.slices.length_ns;
    if (cut_ns < now_ns)
        cut_ns = now_ns;
    if (last->slice_end_ns <= cut_ns)
        return last->slice_end_ns;
    last->slice_end_ns = cut_ns;
    nvs_sim_shared_state->gpus[device->gpu].context_switches++;
    if (process != NULL)
        wake(process, device->gpu);
    else
        wake_clients(device->gpu);
    return cut_ns + nvs_sim_settings.slices.switch_ns;
}

static void begin_slice(nvs_sim_program *own, uint64_t start_ns)
{
    for (uint32_t i = 0; i < 2; i++) {
        own->clock_ns[i] = clock_of(own, i, own->slice_end_ns);
        if (!nvs_sim_settings.mps.client)
            own->rate[i] = SIM_WHOLE;
    }
    own->slice_start_ns = own->slice_end_ns = own->since_ns = start_ns;
}

/* Recomputes the rates of the clocks of MPS, from when_ns on. */
static void update_rates(sim_device *device, uint64_t when_ns)
{
    const nvs_sim_shared *shared = nvs_sim_shared_state;
    nvs_sim_program *clients = &slicer(device)->clients;
    uint64_t wanted[2] = {0, 0};
    for (uint32_t i = 0; i < shared->processes_used; i++)
        wanted[shared->processes[i].mps_priority] += shared->processes[i].demand[device->gpu];
    uint64_t rest = wanted[0] < SIM_WHOLE ? SIM_WHOLE - wanted[0] : 0;
    const uint32_t rates[2] = {wanted[0] <= SIM_WHOLE ? SIM_WHOLE : (uint32_t)((uint64_t)SIM_WHOLE * SIM_WHOLE / wanted[0]),
                               wanted[1] <= rest ? SIM_WHOLE : (uint32_t)(rest * SIM_WHOLE / wanted[1])};
    if (rates[0] == clients->rate[0] && rates[1] == clients->rate[1])
        return;
    if (when_ns > clients->slice_end_ns)
        when_ns = clients->slice_end_ns;
    for (uint32_t i = 0; i < 2; i++) {
        clients->clock_ns[i] = clock_of(clients, i, when_ns);
        clients->rate[i] = rates[i];
    }
    if (when_ns > clients->since_ns)
        clients->since_ns = when_ns;
    wake_clients(device->gpu);
}

/* Extends or begins a slice, up to clock_ns, for work that is ready at ready_ns. */
static void claim_slice(sim_device *device, uint64_t ready_ns, uint64_t clock_ns, uint64_t now_ns)
{
    nvs_sim_slicer *slices = slicer(device);
    nvs_sim_process *self = nvs_sim_self, *process;
    nvs_sim_program *own = program(device), *last = last_program(device, &process);
    if (nvs_sim_settings.mps.client && own->rate[0] == 0)
        update_rates(device, now_ns); /* this is the first client */
    if (nvs_sim_settings.mps.client && own->rate[self->mps_priority] == 0)
        return; /* clients of higher priority use all multiprocessors; the end of their kernels wakes this process */
    if (last != own && now_ns < own->slice_end_ns)
        return; /* another program is next; a new claim follows at the end of this slice */
    if (last != own || ready_ns > own->slice_end_ns) {
        uint64_t start_ns = ready_ns > own->slice_end_ns ? ready_ns : own->slice_end_ns;
        uint64_t free_ns = last == own || last == NULL ? 0 : end_of_last(device, last, process, now_ns);
        begin_slice(own, start_ns > free_ns ? start_ns : free_ns);
    }
    uint64_t end_ns = real_at(own, self->mps_priority, clock_ns);
    if (end_ns > own->slice_end_ns)
        own->slice_end_ns = end_ns;
    slices->last = nvs_sim_settings.mps.client ? NVS_SIM_MAX_PROCESSES : (uint32_t)(self - nvs_sim_shared_state->processes);
    slices->last_process_id = nvs_sim_settings.mps.client ? 0 : self->process_id;
}

/* The demand of the running kernels; only for clients of MPS. */
static void publish_demand(sim_device *device, uint32_t demand, uint64_t now_ns)
{
    uint32_t *published = &nvs_sim_self->demand[device->gpu], before = *published;
    if (!nvs_sim_settings.mps.client || demand == before)
        return;
    *published = demand;
    /* A lower demand counts from the end of the kernel, a higher one from now: other processes have already read their clocks. */
    update_rates(device, demand < before ? device->executor.kernel_end_ns : now_ns);
}

/* `beyond`: a kernel does not end in the present slice. */
static uint64_t next_check(sim_device *device, bool beyond, uint64_t now_ns)
{
    const nvs_sim_program *own = program(device);
    nvs_sim_slicer *slices = slicer(device);
    bool slowed = nvs_sim_settings.mps.client && own->rate[nvs_sim_self->mps_priority] < SIM_WHOLE;
    if (slowed && now_ns - slices->checked_ns >= nvs_sim_settings.slices.length_ns) {
        slices->checked_ns = now_ns;
        nvs_sim_shared_reap(nvs_sim_shared_state);
        update_rates(device, now_ns);
    }
    uint64_t check_ns = beyond || slowed ? now_ns + nvs_sim_settings.slices.length_ns : UINT64_MAX;
    bool ends = beyond && own->slice_end_ns > now_ns;
    return ends && (!slowed || own->slice_end_ns < check_ns) ? own->slice_end_ns : check_ns;
}

/* Acquire: pairs with the release in wake(). */
uint32_t nvs_sim_wakes(const sim_device *device)
{
    return atomic_load_explicit(&nvs_sim_self->wake[device->gpu], memory_order_acquire);
}

void nvs_sim_wake(sim_device *device)
{
    if (device->executor.asleep)
        wake(nvs_sim_self, device->gpu);
    device->executor.asleep = false;
}

void nvs_sim_sleep(sim_device *device, uint32_t wakes, uint64_t until_ns)
{
    struct timespec until = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    const _Atomic uint32_t *word = &nvs_sim_self->wake[device->gpu]; /* before the unlock: the device may move to another GPU */
    device->executor.asleep = true;
    pthread_mutex_unlock(&nvs_sim_lock);
    syscall(SYS_futex, word, FUTEX_WAIT_BITSET, wakes, until_ns == UINT64_MAX ? NULL : &until, NULL,
            FUTEX_BITSET_MATCH_ANY);
    pthread_mutex_lock(&nvs_sim_lock);
    device->executor.asleep = false;
}

/* The running kernels of this process, on that clock. */

/* The kernel that the stream runs; NULL: none, or no other program affects its end. */
static sim_op *running_kernel(const sim_stream *stream)
{
    sim_op *op = stream->queue.head;
    bool found = op != NULL && op->started && op->work.kind == OP_KERNEL && op->work.duration_ns != 0;
    return found && nvs_sim_settings.slices.length_ns != 0 ? op : NULL;
}

/* The part of the multiprocessors that a kernel gets at most. */
static uint32_t granted(const sim_work *work)
{
    const uint32_t share = nvs_sim_settings.mps.client ? nvs_sim_settings.mps.share : SIM_WHOLE;
    return work->u.kernel.demand < share ? work->u.kernel.demand : share;
}

/* The duration on the clock: longer if the kernel wants more than the share of its process. */
static uint64_t clock_duration(const sim_work *work)
{
    uint64_t wanted = work->u.kernel.demand, got = granted(work);
    return wanted == got ? work->duration_ns : work->duration_ns / got * wanted + work->duration_ns % got * wanted / got;
}

/* The end of the head and the kernels that follow it immediately; looks ahead by one slice at most. */
static uint64_t known_work_end(const sim_stream *stream)
{
    uint64_t end_ns = stream->queue.head->clock_end_ns;
    const uint64_t enough = end_ns + nvs_sim_settings.slices.length_ns;
    for (const sim_op *op = stream->queue.head->next; op != NULL && end_ns < enough; op = op->next) {
        if (op->work.kind == OP_KERNEL)
            end_ns += clock_duration(&op->work);
        else if (op->work.kind != OP_RECORD && op->work.kind != OP_EMPTY)
            break;
    }
    return end_ns;
}

/* The stream with the earliest started kernel that is not yet on the clock. */
static sim_stream *next_new(const sim_device *device)
{
    sim_stream *first = NULL;
    for (sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy) {
        const sim_op *op = running_kernel(stream);
        if (op != NULL && op->clock_end_ns == 0 && (first == NULL || op->start_ns < first->queue.head->start_ns))
            first = stream;
    }
    return first;
}

static void claim(sim_device *device, const sim_stream *stream, uint64_t now_ns)
{
    if (!clock_covers(device, stream->queue.head->clock_end_ns))
        claim_slice(device, stream->queue.head->start_ns, known_work_end(stream), now_ns);
}

/* Reads the ends of kernels from the clock.  True if one has ended. */
static bool read_ends(sim_device *device, uint64_t now_ns, bool *beyond)
{
    bool ended = false;
    *beyond = false;
    for (sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy) {
        sim_op *op = running_kernel(stream);
        if (op == NULL)
            continue;
        op->end_ns = op->clock_end_ns == 0 ? UINT64_MAX : clock_end(device, op->clock_end_ns);
        ended = ended || op->end_ns <= now_ns;
        *beyond = *beyond || op->end_ns == UINT64_MAX;
    }
    return ended;
}

/* Puts new kernels on the clock, publishes the demand of all, and claims time for them.  The clock of new kernels is read before their
 * demand slows it: a kernel that was ready before this thread woke has run until now. */
static void schedule(sim_device *device, uint64_t now_ns)
{
    uint64_t demand = 0;
    for (sim_stream *stream; (stream = next_new(device)) != NULL;) {
        sim_op *op = stream->queue.head;
        op->clock_end_ns = clock_at(device, op->start_ns) + clock_duration(&op->work);
        claim(device, stream, now_ns);
    }
    for (const sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy)
        demand += running_kernel(stream) != NULL ? granted(&stream->queue.head->work) : 0;
    publish_demand(device, demand < nvs_sim_settings.mps.share ? (uint32_t)demand : nvs_sim_settings.mps.share, now_ns);
    for (const sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy)
        if (running_kernel(stream) != NULL)
            claim(device, stream, now_ns);
}

uint64_t nvs_sim_time_kernels(sim_device *device, uint64_t *check_ns)
{
    bool any = false, beyond;
    *check_ns = UINT64_MAX;
    for (const sim_stream *stream = device->executor.busy; stream != NULL && !any; stream = stream->queue.next_busy)
        any = running_kernel(stream) != NULL;
    if (!any && nvs_sim_self->demand[device->gpu] == 0)
        return nvs_sim_now_ns();
    nvs_sim_shared_lock(nvs_sim_shared_state);
    const uint64_t now_ns = nvs_sim_now_ns(); /* after the lock: no slice is cut before this time */
    if (!read_ends(device, now_ns, &beyond)) { /* ended kernels complete first: a new slice would move their end */
        schedule(device, now_ns);
        read_ends(device, now_ns, &beyond);
        if (any)
            *check_ns = next_check(device, beyond, now_ns);
    }
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return now_ns;
}
