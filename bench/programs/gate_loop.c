/* The cost of one driver call: a loop around it, timed.
 *
 * usage: gate_loop CALL CALLS ROUNDS
 * CALL: memset0 (a memset of no bytes: gated, and next to nothing for the driver), launch (an empty kernel, synchronised every 512),
 * context (cuCtxGetDevice, which is not gated: a control).  Prints one JSON object: nanoseconds per call of each round.
 *
 * The program knows nothing of the hook; it is run with and without it.  It finds the driver as a CUDA runtime does:
 * dlopen, dlsym, then calls through pointers.
 */
#define _GNU_SOURCE /* driver_program.h */
#include "driver_program.h"

#include <sched.h>
#include <string.h>

typedef int (*call_fn)(void);

static int (*cu_context_device)(int *);
static int (*cu_memset)(uint64_t, unsigned char, size_t, void *);

static void *function;
static uint64_t memory;
static unsigned launched;

static int call_memset0(void) { return cu_memset(memory, 0, 0, stream); }
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
    open_driver(".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing()\n{\n  ret;\n}\n");
    function = kernel_of_module("nothing");
    *(void **)&cu_context_device = symbol(library, "cuCtxGetDevice");
    *(void **)&cu_memset = symbol(library, "cuMemsetD8Async");
    check(cu_allocate(&memory, 65536), "cuMemAlloc");
    check(cu_memset(memory, 0, 65536, stream), "cuMemsetD8Async"); /* from here on the lease is held */
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
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
    static const struct { const char *name; call_fn call; } known[] = {
        {"memset0", call_memset0}, {"launch", call_launch}, {"context", call_context},
    };
    long calls = argc == 4 ? atol(argv[2]) : 0, rounds = argc == 4 ? atol(argv[3]) : 0;
    call_fn call = NULL;
    for (size_t i = 0; argc == 4 && i < sizeof known / sizeof *known; i++)
        if (strcmp(argv[1], known[i].name) == 0)
            call = known[i].call;
    if (call == NULL || calls < 1 || rounds < 1) {
        fprintf(stderr, "usage: gate_loop memset0|launch|context CALLS ROUNDS\n");
        return 2;
    }
    set_up();
    pin();
    for (long i = 0; i < calls / 10 + 1; i++)
        check(call(), argv[1]);
    printf("{\"call\": \"%s\", \"ns\": [", argv[1]);
    for (long round = 0; round < rounds; round++) {
        uint64_t start = now_ns();
        for (long i = 0; i < calls; i++)
            call();
        printf("%s%.3f", round ? ", " : "", (double)(now_ns() - start) / (double)calls);
    }
    printf("]}\n");
    return cu_stream_synchronize(stream) == 0 ? 0 : 1;
}
