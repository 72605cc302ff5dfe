/* The ends of running kernels, by the clock of their program (device/slices.c), which runs while the program has the GPU.
 *
 * The kernels of one process run concurrently, each at full speed.  Work that is not a kernel is not slowed by kernels, as copy
 * engines are not.
 */
#include "base/state_file.h"
#include "stream/stream.h"

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
    if (!nvs_sim_clock_covers(device, stream->queue.head->clock_end_ns))
        nvs_sim_claim(device, stream->queue.head->start_ns, known_work_end(stream), now_ns);
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
        op->end_ns = op->clock_end_ns == 0 ? UINT64_MAX : nvs_sim_clock_end(device, op->clock_end_ns);
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
        op->clock_end_ns = nvs_sim_clock_at(device, op->start_ns) + clock_duration(&op->work);
        claim(device, stream, now_ns);
    }
    for (const sim_stream *stream = device->executor.busy; stream != NULL; stream = stream->queue.next_busy)
        demand += running_kernel(stream) != NULL ? granted(&stream->queue.head->work) : 0;
    nvs_sim_demand(device, demand < nvs_sim_settings.mps.share ? (uint32_t)demand : nvs_sim_settings.mps.share, now_ns);
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
    if (!any && nvs_sim_self()->demand[device->gpu] == 0)
        return nvs_sim_now_ns();
    nvs_sim_shared_lock(nvs_sim_shared_state);
    const uint64_t now_ns = nvs_sim_now_ns(); /* after the lock: no slice is cut before this time */
    if (!read_ends(device, now_ns, &beyond)) { /* ended kernels complete first: a new slice would move their end */
        schedule(device, now_ns);
        read_ends(device, now_ns, &beyond);
        if (any)
            *check_ns = nvs_sim_next_check(device, beyond, now_ns);
    }
    nvs_sim_shared_unlock(nvs_sim_shared_state);
    return now_ns;
}
