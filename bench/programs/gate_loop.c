/* What one gated driver call costs: a loop around it, timed, with its instructions counted where the kernel lets us.
 *
 * usage: gate_loop CALL CALLS ROUNDS
 * CALL: memset0 (a memset of no bytes), copy0 (a device copy of no bytes), nofunction (a launch without a function: refused by the
 * driver after the gate), launch (an empty kernel, synchronised every 512), context (cuCtxGetDevice, which is not gated:
 * a control).  Prints one JSON object: nanoseconds per call of each round, and instructions per call or null.
 *
 * The program knows nothing of the hook; it is run with and without it.  It finds the driver as a CUDA runtime does:
 * dlopen, dlsym, then calls through pointers.
 */
#define _GNU_SOURCE /* driver_program.h */
#include "driver_program.h"

#include <linux/perf_event.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef int (*call_fn)(void);

static int (*cu_context_device)(int *);
static int (*cu_memset)(uint64_t, unsigned char, size_t, void *);
static int (*cu_copy)(uint64_t, uint64_t, size_t, void *);

static void *function;
static uint64_t memory;
static unsigned launched;

static int call_memset0(void) { return cu_memset(memory, 0, 0, stream); }
static int call_copy0(void) { return cu_copy(memory, memory + 4096, 0, stream); }
static int call_nofunction(void) { return cu_launch(NULL, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL); }
static int call_launch(void)
{
    if (++launched % 512 == 0)
        cu_stream_synchronize(stream);
    return cu_launch(function, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL);
}
static int call_context(void)
{
    int device;
    return cu_context_device(&device);
}

static void set_up(void)
{
    open_driver(PTX_EMPTY);
    function = kernel_of_module("nothing");
    *(void **)&cu_context_device = symbol(library, "cuCtxGetDevice");
    *(void **)&cu_memset = symbol(library, "cuMemsetD8Async");
    *(void **)&cu_copy = symbol(library, "cuMemcpyDtoDAsync_v2");
    check(cu_allocate(&memory, 65536), "cuMemAlloc");
    check(cu_memset(memory, 0, 65536, stream), "cuMemsetD8Async"); /* from here on the lease is held */
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
}

static int count_instructions(void)
{
    struct perf_event_attr wanted;
    memset(&wanted, 0, sizeof wanted);
    wanted.type = PERF_TYPE_HARDWARE;
    wanted.size = sizeof wanted;
    wanted.config = PERF_COUNT_HW_INSTRUCTIONS;
    wanted.disabled = 1;
    wanted.exclude_kernel = 1;
    wanted.exclude_hv = 1;
    return (int)syscall(SYS_perf_event_open, &wanted, 0, -1, -1, 0);
}

/* Stays on one core: moving costs more than a call does. */
static void pin(void)
{
    cpu_set_t one;
    int core = sched_getcpu();
    CPU_ZERO(&one);
    CPU_SET(core < 0 ? 0 : core, &one);
    sched_setaffinity(0, sizeof one, &one);
}

int main(int argc, char **argv)
{
    static const struct { const char *name; call_fn call; int may_fail; } known[] = {
        {"memset0", call_memset0, 0}, {"copy0", call_copy0, 0}, {"nofunction", call_nofunction, 1},
        {"launch", call_launch, 0}, {"context", call_context, 0},
    };
    long calls = argc == 4 ? atol(argv[2]) : 0, rounds = argc == 4 ? atol(argv[3]) : 0;
    call_fn call = NULL;
    int counter, result = 0, may_fail = 0;
    uint64_t instructions = 0;
    for (size_t i = 0; argc == 4 && i < sizeof known / sizeof *known; i++)
        if (strcmp(argv[1], known[i].name) == 0) {
            call = known[i].call;
            may_fail = known[i].may_fail;
        }
    if (call == NULL || calls < 1 || rounds < 1) {
        fprintf(stderr, "usage: gate_loop memset0|copy0|nofunction|launch|context CALLS ROUNDS\n");
        return 2;
    }
    set_up();
    pin();
    for (long i = 0; i < calls / 10 + 1; i++)
        result |= call();
    if (!may_fail)
        check(result, argv[1]);
    counter = count_instructions();
    printf("{\"call\": \"%s\", \"ns\": [", argv[1]);
    for (long round = 0; round < rounds; round++) {
        uint64_t start, end;
        if (counter >= 0)
            ioctl(counter, PERF_EVENT_IOC_ENABLE, 0);
        start = now_ns();
        for (long i = 0; i < calls; i++)
            call();
        end = now_ns();
        if (counter >= 0)
            ioctl(counter, PERF_EVENT_IOC_DISABLE, 0);
        printf("%s%.3f", round ? ", " : "", (double)(end - start) / (double)calls);
    }
    if (counter >= 0 && read(counter, &instructions, sizeof instructions) == (ssize_t)sizeof instructions && instructions > 0)
        printf("], \"instructions\": %.2f}\n", (double)instructions / (double)calls / (double)rounds);
    else
        printf("], \"instructions\": null}\n");
    return cu_stream_synchronize(stream) == 0 ? 0 : 1;
}
