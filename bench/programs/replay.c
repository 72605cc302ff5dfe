/* Short kernels, launched one by one or as CUDA graphs, checked and timed on request: a program of nvshare.bench.compatibility.
 *
 * Speaks the line protocol of bench/harness/worker_group.py:  `check NAME` -> {"digest": ...}   `time NAME STEPS` -> {"ns": ...}
 * NAME: launches (20 kernels a step), graph (a graph of 20 kernels a step), graph1 (a graph of one kernel: nothing but its launch); and, to be
 * timed only, busy (20 kernels a step, each of as many nanoseconds as the program's argument says).
 */
#define _GNU_SOURCE /* driver_program.h */
#include "busy_kernel.h"
#include "driver_program.h"

#include <string.h>

enum { KERNELS = 20, WORDS = 1 << 14, BLOCK = 256, ROUNDS = 400, CAPTURE_THREAD_LOCAL = 1 };

/* words[i] = words[i] * 1664525 + 1013904223 + i: any kernel that is lost, repeated or runs on other data shows. */
static const char kernel[] =
    PTX_HEAD
    ".visible .entry mix(.param .u64 words)\n{\n"
    "  .reg .u64 %a<4>;\n  .reg .u32 %r<8>;\n"
    "  ld.param.u64 %a1, [words];\n  cvta.to.global.u64 %a1, %a1;\n"
    "  mov.u32 %r1, %ctaid.x;\n  mov.u32 %r2, %ntid.x;\n  mov.u32 %r3, %tid.x;\n  mad.lo.u32 %r4, %r1, %r2, %r3;\n"
    "  mul.wide.u32 %a2, %r4, 4;\n  add.u64 %a1, %a1, %a2;\n"
    "  ld.global.u32 %r5, [%a1];\n  mad.lo.u32 %r5, %r5, 1664525, 1013904223;\n  add.u32 %r5, %r5, %r4;\n"
    "  st.global.u32 [%a1], %r5;\n  ret;\n}\n"
    PTX_BUSY;

static int (*cu_graph_launch)(void *, void *);
static int (*cu_copy_in)(uint64_t, const void *, size_t);

static void *mix, *busy, *graphs[2];
static uint64_t words, busy_ns;
static void *mix_arguments[] = {&words}, *busy_arguments[] = {&busy_ns};

static void launches(int kernels)
{
    for (int i = 0; i < kernels; i++)
        check(cu_launch(mix, WORDS / BLOCK, 1, 1, BLOCK, 1, 1, 0, stream, mix_arguments, NULL), "cuLaunchKernel");
}

static void be_busy(void)
{
    for (int i = 0; i < KERNELS; i++)
        check(cu_launch(busy, 1, 1, 1, 1, 1, 1, 0, stream, busy_arguments, NULL), "cuLaunchKernel");
}

static void *capture(int kernels)
{
    int (*begin)(void *, int), (*end)(void *, void **), (*instantiate)(void **, void *, unsigned long long);
    void *graph, *instance;
    *(void **)&begin = symbol(library, "cuStreamBeginCapture_v2");
    *(void **)&end = symbol(library, "cuStreamEndCapture");
    *(void **)&instantiate = symbol(library, "cuGraphInstantiateWithFlags");
    check(begin(stream, CAPTURE_THREAD_LOCAL), "cuStreamBeginCapture");
    launches(kernels);
    check(end(stream, &graph), "cuStreamEndCapture");
    check(instantiate(&instance, graph, 0), "cuGraphInstantiate");
    return instance;
}

static void set_up(void)
{
    open_driver(kernel);
    *(void **)&cu_graph_launch = symbol(library, "cuGraphLaunch");
    *(void **)&cu_copy_in = symbol(library, "cuMemcpyHtoD_v2");
    mix = kernel_of_module("mix");
    busy = kernel_of_module("nvs_busy");
    check(cu_allocate(&words, WORDS * sizeof(uint32_t)), "cuMemAlloc");
    graphs[0] = capture(KERNELS);
    graphs[1] = capture(1);
}

static void step(const char *name)
{
    if (strcmp(name, "launches") == 0)
        launches(KERNELS);
    else if (strcmp(name, "busy") == 0)
        be_busy();
    else
        check(cu_graph_launch(graphs[strcmp(name, "graph1") == 0], stream), "cuGraphLaunch");
}

static uint64_t digest(const char *name)
{
    static uint32_t host[WORDS];
    uint64_t value = 14695981039346656037u;
    for (uint32_t i = 0; i < WORDS; i++)
        host[i] = i * 2654435761u;
    check(cu_copy_in(words, host, sizeof host), "cuMemcpyHtoD");
    for (int i = 0; i < ROUNDS; i++)
        step(name);
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
    check(cu_copy_out(host, words, sizeof host), "cuMemcpyDtoH");
    for (uint32_t i = 0; i < WORDS; i++)
        value = (value ^ host[i]) * 1099511628211u;
    return value;
}

int main(int argc, char **argv)
{
    char line[128], name[32];
    unsigned long steps;
    busy_ns = argc > 1 ? strtoull(argv[1], NULL, 10) : 0;
    puts("{\"ready\": true}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (library == NULL)
            set_up();
        if (sscanf(line, "check %31s", name) == 1) {
            printf("{\"digest\": \"%016llx\"}\n", (unsigned long long)digest(name));
        } else if (sscanf(line, "time %31s %lu", name, &steps) == 2) {
            uint64_t begin = now_ns();
            for (unsigned long i = 0; i < steps; i++)
                step(name);
            check(cu_stream_synchronize(stream), "cuStreamSynchronize");
            printf("{\"ns\": %llu}\n", (unsigned long long)(now_ns() - begin));
        } else {
            fprintf(stderr, "replay: what is '%s'?\n", line);
            return 2;
        }
        fflush(stdout);
    }
    return 0;
}
