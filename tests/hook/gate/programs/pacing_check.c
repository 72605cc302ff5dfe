/* Pacing against a driver that is a model: one GPU that works in the order of submission, in a time that only we move.
 *
 * What is checked is exact and repeatable: how much GPU time is pending after each submission, how long the GPU has been idle, how many
 * calls pacing makes of the driver.  One scenario a run, named by the argument.
 */
#include "pacing_model.h"

#include <pthread.h>
#include <string.h>

/* ---- The application ---- */

static bool one_kernel; /* else each length of work is a kernel of its own */

static void submit(unsigned which, uint64_t work_ns, bool graph)
{
    model_stream *stream = &model.streams[which];
    nvs_slot *slot = nvs_gate_enter(0);
    uint64_t start;
    model.now_ns += LAUNCH_NS;
    if (model.busy_until_ns != 0 && model.now_ns > model.busy_until_ns)
        model.idle_ns += model.now_ns - model.busy_until_ns;
    start = model.now_ns > model.busy_until_ns ? model.now_ns : model.busy_until_ns;
    model.busy_until_ns = start + work_ns;
    if (stream->ends_ns != NEVER)
        stream->ends_ns = model.busy_until_ns;
    if (graph ? nvs_gate_leave_graph(slot, 0, (void *)(uintptr_t)work_ns) : nvs_gate_leave(slot, 0))
        nvs_pace_after(0, which == DEFAULT_STREAM ? CU_STREAM_LEGACY : (CUstream)(uintptr_t)(0x100 + which),
                       nvs_pace_what(NVS_ID_cuLaunchKernel, (void *)(uintptr_t)(one_kernel ? 0x1000 : 0x1000 + 0x40 * work_ns), 1));
    if (model.busy_until_ns > model.now_ns && model.busy_until_ns - model.now_ns > model.most_pending_ns)
        model.most_pending_ns = model.busy_until_ns - model.now_ns;
}

static void synchronize(void)
{
    if (model.now_ns < model.busy_until_ns)
        model.now_ns = model.busy_until_ns;
    nvs_pace_synchronized();
}

/* Counts begin here: what comes before taught pacing how long the work is. */
static void count_from_here(void)
{
    model.calls = model.records = model.naps = 0;
    model.idle_ns = model.most_pending_ns = 0;
    if (model.busy_until_ns < model.now_ns)
        model.busy_until_ns = model.now_ns;
}

static void begin(uint64_t budget_ns, bool paced)
{
    model.current = first_context;
    for (unsigned i = 0; i <= STREAMS; i++)
        model.streams[i].context = first_context;
    nvs_gate_init();
    nvs_pacing_set_budget(0, budget_ns, 0);
    nvs_gate_open(0, paced);
}

/* ---- Scenarios ---- */

/* A GPU that is never idle, a queue within the budget, and next to no calls of the driver: `share_of_launches` per mille. */
static void saturated(bool paced, uint64_t kernel_ns, bool graph, unsigned streams)
{
    const unsigned count = (unsigned)(1000 * MS / kernel_ns);
    begin(paced ? 10 * MS : 0, paced);
    for (unsigned i = 0; i < count; i++)
        submit(i % streams, kernel_ns, graph);
    MUST(model.most_pending_ns <= 10 * MS); /* from the first submission on */
    count_from_here();
    for (unsigned i = 0; i < count; i++)
        submit(i % streams, kernel_ns, graph);
    MUST(model.most_pending_ns <= 10 * MS && model.most_pending_ns >= 2 * MS);
    MUST(model.idle_ns == 0);
    if (!paced && kernel_ns < MS) /* per stream and millisecond of work: an event, and what belongs to it */
        MUST(model.records <= 1000 * streams && model.calls <= 16000 * streams);
}

/* Bound by launching: nothing is pending, so nothing may wait, and looks are rare. */
static void light(void)
{
    begin(0, false);
    for (unsigned i = 0; i < 10000; i++)
        submit(0, 1000, false);
    count_from_here();
    const uint64_t began = model.now_ns;
    for (unsigned i = 0; i < 100000; i++)
        submit(0, 1000, false);
    const uint64_t ours = model.now_ns - began - 100000ull * LAUNCH_NS;
    MUST(model.naps == 0 && ours * 2000 <= model.now_ns - began); /* at most 0.05 % */
}

/* From short kernels to long ones: until looks have seen it, the driver's own limit bounds what is pending. */
static void turning(void)
{
    enum { DRIVERS_QUEUE = 1024, LONG_NS = 100000 };
    begin(0, false);
    for (unsigned i = 0; i < 50000; i++)
        submit(0, 1000, false);
    for (unsigned i = 0; i < 10000; i++) {
        if (model.busy_until_ns > model.now_ns + DRIVERS_QUEUE * LONG_NS)
            model.now_ns = model.busy_until_ns - DRIVERS_QUEUE * LONG_NS;
        if (i == 3 * DRIVERS_QUEUE)
            count_from_here();
        submit(0, LONG_NS, false);
    }
    MUST(model.most_pending_ns <= 10 * MS && model.idle_ns == 0);
}

/* The same with a slow language in between: what pacing asks the driver is found in no cache, so the calls are counted. */
static void interpreted(void)
{
    begin(0, false);
    for (unsigned i = 0; i < 20000; i++) {
        model.now_ns += 5000;
        submit(0, 2000, false);
        if (i == 10000)
            count_from_here();
        if (i % 200 == 199)
            synchronize();
    }
    MUST(model.naps == 0 && model.calls <= 10000 / 100); /* one in a hundred launches */
}

/* The same, and slow at first, with pauses: what pacing believes of it is neither what its first steps were like nor its mean. */
static void warmed_up(void)
{
    begin(0, false);
    for (unsigned i = 0; i < 60000; i++) {
        model.now_ns += i < 5000 ? 70000 : 9000;
        if (i % 1000 == 999)
            model.now_ns += 20 * MS;
        submit(0, 2000, false);
        if (i == 10000)
            count_from_here();
    }
    MUST(model.naps == 0 && model.calls <= 50000 / 100);
}

static void step(bool synchronizes)
{
    for (unsigned i = 0; i < 1000; i++)
        submit(0, 50000, false); /* 50 ms of work ... */
    if (synchronizes)
        synchronize();
    model.now_ns += 40 * MS; /* ... and 40 ms of something else, meanwhile or after it */
}

/* Runs ahead for a reason: at the latest after some steps it must be as fast as without the hook. */
static void run_ahead(void)
{
    begin(0, false);
    for (unsigned i = 0; i < 8; i++)
        step(false);
    count_from_here();
    for (unsigned i = 0; i < 20; i++)
        step(false);
    MUST(model.idle_ns < 20 * 50 * MS / 100); /* the GPU is busy but for 1 % */
}

/* Waits for its own work: that the GPU is idle afterwards is not pacing's doing, and the queue stays bounded. */
static void synchronizing(void)
{
    begin(0, false);
    for (unsigned i = 0; i < 30; i++)
        step(true);
    MUST(model.most_pending_ns <= 10 * MS);
}

/* What is submitted next may be what the work waits for: whoever submits it must get there. */
static void blocked(bool paced, bool from_the_start)
{
    begin(paced ? 10 * MS : 0, paced);
    for (unsigned i = 0; i < 100 && !from_the_start; i++)
        submit(0, 5 * MS, false);
    model.streams[0].ends_ns = NEVER;
    const uint64_t began = model.now_ns;
    for (unsigned i = 0; i < 200; i++)
        submit(0, 5 * MS, false);
    MUST(model.now_ns - began < 500 * MS); /* held up once, and not for good */
}

/* The same again and again: each time the work ends at last. */
static void blocked_again(bool paced)
{
    begin(paced ? 10 * MS : 0, paced);
    for (unsigned i = 0; i < 100; i++)
        submit(0, 5 * MS, false);
    uint64_t held_ns = 0;
    for (unsigned round = 0; round < 100; round++) {
        model.streams[0].ends_ns = NEVER;
        const uint64_t began = model.now_ns;
        for (unsigned i = 0; i < 20; i++)
            submit(0, 5 * MS, false);
        held_ns += model.now_ns - began;
        model.streams[0].ends_ns = model.busy_until_ns = model.now_ns += MS;
    }
    MUST(held_ns < 5000 * MS);
}

/* The work waits for a host function, and that for the thread. */
static void behind_host_function(bool paced)
{
    begin(paced ? 10 * MS : 0, paced);
    for (unsigned i = 0; i < 100; i++)
        submit(0, 5 * MS, false);
    model.streams[0].ends_ns = NEVER;
    atomic_store(&nvs_host_functions_count[0], 1);
    const uint64_t began = model.now_ns;
    for (unsigned i = 0; i < 200; i++)
        submit(0, 5 * MS, false);
    MUST(model.now_ns - began < 20 * MS);
}

/* A step of a training job: long kernels, then short fills of all of its memory, then a look at the result. */
static void mixed_step(void)
{
    for (unsigned i = 0; i < 20; i++)
        submit(0, MS, false);
    for (unsigned i = 0; i < 60; i++)
        submit(0, 20000, false);
    synchronize();
}

/* Kinds of work that differ a hundredfold: the queue stays bounded, and the GPU does not wait for a thread that naps too long.  Between
 * two steps it is idle for as long as the first launch takes, with pacing or without. */
static void mixture(void)
{
    begin(10 * MS, true);
    for (unsigned i = 0; i < 4; i++)
        mixed_step();
    count_from_here();
    for (unsigned i = 0; i < 20; i++)
        mixed_step();
    MUST(model.most_pending_ns <= 10 * MS);
    MUST(model.idle_ns <= 20 * (LAUNCH_NS + 10 * CALL_NS));
}

/* Kernels between 2 us and 1.5 ms in an order that does not repeat, on some streams.  One of the longest may come on top of a full
 * queue, and some kernels share an estimate (with more of them than the table has places, many): the bound is missed by a little. */
static void medley(unsigned streams, unsigned kernels, uint64_t bound_ns)
{
    uint32_t random = 1;
    begin(10 * MS, true);
    for (unsigned i = 0; i < 40000; i++) {
        random = random * 1664525u + 1013904223u;
        const uint64_t which = (random >> 16) % kernels * 300 / kernels;
        if (i == 20000)
            count_from_here();
        submit(i % streams, 2000 + which * which * which / 18, false);
    }
    MUST(model.most_pending_ns <= bound_ns);
    MUST(model.idle_ns <= 20 * MS); /* of some eight seconds */
}

/* Kernels all alike that suddenly take ten times as long, under the same name: bounded again soon. */
static void longer(void)
{
    begin(10 * MS, true);
    one_kernel = true;
    for (unsigned i = 0; i < 1000; i++)
        submit(0, 20000, false);
    for (unsigned i = 0; i < 20000; i++) {
        if (i == 10000)
            count_from_here();
        submit(0, 200000, false);
    }
    MUST(model.most_pending_ns <= 10 * MS);
}

static void other_context(void)
{
    begin(10 * MS, true);
    model.streams[0].context = second_context;
    for (unsigned i = 0; i < 20000; i++)
        submit(0, 50000, false);
    MUST(model.most_pending_ns <= 10 * MS && model.pushes > 0 && model.current == first_context);
}

/* The stream that has no name is another one in each context, so the current one has to be known; it need not be asked for. */
static void default_stream(void)
{
    begin(10 * MS, true);
    for (unsigned i = 0; i < 1000; i++)
        submit(DEFAULT_STREAM, 50000, false);
    MUST(model.asked >= 1000 && model.records > 0);
    atomic_store_explicit(&nvs_hot.only_context, first_context, memory_order_relaxed);
    model.asked = 0;
    for (unsigned i = 0; i < 10000; i++)
        submit(DEFAULT_STREAM, 50000, false);
    MUST(model.asked == 0);
    atomic_store_explicit(&nvs_hot.only_context, NULL, memory_order_relaxed);
    model.current = model.streams[DEFAULT_STREAM].context = second_context;
    for (unsigned i = 0; i < 10000; i++)
        submit(DEFAULT_STREAM, 50000, false);
    MUST(model.asked >= 10000 && model.most_pending_ns <= 10 * MS && model.pushes == 0);
}

static void capturing(void)
{
    begin(10 * MS, true);
    atomic_store_explicit(&nvs_hot.capturing, 1, memory_order_relaxed);
    for (unsigned i = 0; i < 1000; i++)
        submit(0, 0, false);
    MUST(model.calls == 0);
    atomic_store_explicit(&nvs_hot.capturing, 0, memory_order_relaxed);
    model.streams[0].capturing = true; /* one that no hook has seen begin */
    for (unsigned i = 0; i < 1000; i++)
        submit(0, 0, false);
    MUST(model.records == 0 && model.naps == 0);
}

#include "pacing_threads.h"

int main(int argc, char **argv)
{
    const char *what = argc == 3 ? argv[1] : "";
    const bool paced = argc == 3 && strcmp(argv[2], "paced") == 0;
#define SCENARIO(name, run) if (strcmp(what, name) == 0) run; else
    SCENARIO("kernels", saturated(paced, 5000, false, 1))
    SCENARIO("long-kernels", saturated(paced, MS, false, 1))
    SCENARIO("streams", saturated(paced, 5000, false, STREAMS))
    SCENARIO("graphs", saturated(paced, 20000, true, 1))
    SCENARIO("long-graphs", saturated(paced, 400000, true, 1))
    SCENARIO("mixture", mixture())
    SCENARIO("medley", medley(1, 100, 13 * MS))
    SCENARIO("many-kernels", medley(1, 300, 15 * MS))
    SCENARIO("medley-streams", medley(STREAMS, 100, 13 * MS))
    SCENARIO("longer", longer())
    SCENARIO("threads", threads(paced))
    SCENARIO("blocked", blocked(paced, false))
    SCENARIO("blocked-at-first", blocked(paced, true))
    SCENARIO("blocked-again", blocked_again(paced))
    SCENARIO("behind-host-function", behind_host_function(paced))
    SCENARIO("light", light())
    SCENARIO("interpreted", interpreted())
    SCENARIO("turning", turning())
    SCENARIO("warmed-up", warmed_up())
    SCENARIO("run-ahead", run_ahead())
    SCENARIO("synchronizing", synchronizing())
    SCENARIO("other-context", other_context())
    SCENARIO("default-stream", default_stream())
    SCENARIO("capturing", capturing())
    SCENARIO("ended", ended(paced))
    SCENARIO("ended-context", ended_context(false))
    SCENARIO("context-ended-first", ended_context(true))
    SCENARIO("forked", forked())
        return 2;
    puts("good");
    return 0;
}
