/* Keeps a GPU busy with short kernels and notes every launch that had to wait: one of the programs of nvshare.bench.handover.
 *
 * usage: saturate SECONDS KERNEL_NS DEPTH
 * Never more than DEPTH kernels in flight, by events of its own, so that a launch blocks for the lease and for nothing else.
 * SIGTERM ends it before its time, in order.  Prints one JSON object: the process, its launches, and [called_ns, returned_ns] (CLOCK_MONOTONIC) of each launch
 * that took longer than 50 us.
 */
#define _GNU_SOURCE /* driver_program.h */
#include "driver_program.h"

#include <signal.h>
#include <unistd.h>

enum { MAX_DEPTH = 8192, MAX_STAMPS = 65536, BLOCKED_NS = 50000 };

/* A kernel that takes as long as its parameter says, in nanoseconds; the simulated GPU knows its name. */
static const char busy_kernel[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nvs_busy(.param .u64 duration)\n{\n"
    "  .reg .u64 %t<4>;\n  .reg .pred %p<2>;\n"
    "  ld.param.u64 %t1, [duration];\n  mov.u64 %t2, %globaltimer;\n  add.u64 %t2, %t2, %t1;\n"
    "again:\n  mov.u64 %t3, %globaltimer;\n  setp.lt.u64 %p1, %t3, %t2;\n  @%p1 bra again;\n  ret;\n}\n";

static int (*cu_event_create)(void **, unsigned);
static int (*cu_event_record)(void *, void *);
static int (*cu_event_wait)(void *);

static uint64_t stamps[MAX_STAMPS][2];
static volatile sig_atomic_t stopped;

static void stop(int number)
{
    (void)number;
    stopped = 1;
}

int main(int argc, char **argv)
{
    double seconds = argc == 4 ? atof(argv[1]) : 0;
    uint64_t duration = argc == 4 ? strtoull(argv[2], NULL, 10) : 0, launches = 0, end;
    int depth = argc == 4 ? atoi(argv[3]) : 0;
    size_t count = 0;
    void *function, *events[MAX_DEPTH], *arguments[] = {&duration};
    if (seconds <= 0 || duration == 0 || depth < 1 || depth > MAX_DEPTH) {
        fprintf(stderr, "usage: saturate SECONDS KERNEL_NS DEPTH (at most %d)\n", MAX_DEPTH);
        return 2;
    }
    signal(SIGTERM, stop);
    open_driver(busy_kernel);
    function = kernel_of_module("nvs_busy");
    *(void **)&cu_event_create = symbol(library, "cuEventCreate");
    *(void **)&cu_event_record = symbol(library, "cuEventRecord");
    *(void **)&cu_event_wait = symbol(library, "cuEventSynchronize");
    for (int i = 0; i < depth; i++)
        check(cu_event_create(&events[i], 2 /* no timing */), "cuEventCreate");
    end = now_ns() + (uint64_t)(seconds * 1e9);
    for (;;) {
        void *event = events[launches % (uint64_t)depth];
        uint64_t called, returned;
        if (launches >= (uint64_t)depth)
            check(cu_event_wait(event), "cuEventSynchronize");
        called = now_ns();
        if (called >= end || stopped)
            break;
        check(cu_launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
        returned = now_ns();
        if (returned - called > BLOCKED_NS && count < MAX_STAMPS) {
            stamps[count][0] = called;
            stamps[count++][1] = returned;
        }
        check(cu_event_record(event, stream), "cuEventRecord");
        launches++;
    }
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
    printf("{\"process_id\": %d, \"launches\": %llu, \"blocked\": [", (int)getpid(), (unsigned long long)launches);
    for (size_t i = 0; i < count; i++)
        printf("%s[%llu, %llu]", i ? ", " : "", (unsigned long long)stamps[i][0], (unsigned long long)stamps[i][1]);
    printf("]}\n");
    return 0;
}
