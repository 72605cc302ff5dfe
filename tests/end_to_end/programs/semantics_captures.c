/* Work that runs beside an open capture while the GPU is shared, on streams that nobody can ask about then.
 *
 * Each case queues a long kernel and a fill behind it.  Where the variable WINDOWS names a file, the case appends when the kernel was seen to run:
 * first and last look, in ns.  The case "watcher" prints its own short kernels in the same way, until its input ends.
 */
#define SPINS
#include "cuda_program.h"

#include <poll.h>
#include <pthread.h>
#include <sysexits.h>

enum { BYTES = 8 * MIB, BEFORE = 3, AFTER = 9 };
#define LONG_NS 60000000u

static CUdeviceptr memory;
static CUevent behind; /* the fill */

static uint64_t long_ns(void)
{
    const char *told = getenv("LONG_NS"); /* on a card, where others come less often */
    return told != NULL ? strtoull(told, NULL, 10) : LONG_NS;
}

static void start(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    begin();
    OK(cuThreadExchangeStreamCaptureMode(&mode)); /* so that events can be asked about and memory freed beside a capture */
    memory = filled(BYTES, BEFORE);
    OK(cuEventCreate(&behind, CU_EVENT_DISABLE_TIMING));
    OK(cuCtxSynchronize());
}

static void work_on(CUstream stream)
{
    OK(launch(stream, long_ns()));
    OK(cuMemsetD32Async(memory, AFTER, BYTES / 4, stream));
    OK(cuEventRecord(behind, stream));
}

/* Waits for the work in no call that the hook sees.
 *
 * The case says nothing, and ends with EX_TEMPFAIL, where the lease went between the kernel and what is behind it: the work is over then. */
static void watch(void)
{
    const char *windows = getenv("WINDOWS");
    const uint64_t first = now_ns();
    uint64_t last = first;
    while (cuEventQuery(behind) == CUDA_ERROR_NOT_READY) {
        last = now_ns();
        usleep(200);
    }
    if (last == first)
        _exit(EX_TEMPFAIL);
    FILE *file = windows != NULL ? fopen(windows, "a") : NULL;
    if (file != NULL) {
        fprintf(file, "%llu %llu\n", (unsigned long long)first, (unsigned long long)last);
        fclose(file);
    }
}

static void end_capture(CUstream stream)
{
    CUgraph graph = NULL;
    OK(launch(stream, 1000));
    OK(cuStreamEndCapture(stream, &graph));
    CHECK(graph != NULL, "the capture made no graph");
    OK(cuCtxSynchronize());
    CHECK(holds(memory, BYTES, AFTER), "work beside a capture was lost");
}

/* ---- Submitted while a capture is open ---- */

static void legacy(void)
{
    start();
    const CUstream captured = capturing(CU_STREAM_NON_BLOCKING);
    work_on(CU_STREAM_LEGACY);
    watch();
    end_capture(captured);
}

static void null_stream(void)
{
    start();
    const CUstream captured = capturing(CU_STREAM_NON_BLOCKING);
    OK(launch(NULL, long_ns()));
    OK(cuMemsetD32(memory, AFTER, BYTES / 4)); /* names no stream, and does not wait */
    OK(cuEventRecord(behind, NULL));
    watch();
    end_capture(captured);
}

static void *on_own_stream(void *nothing)
{
    OK(cuCtxSetCurrent(primary));
    work_on(CU_STREAM_PER_THREAD);
    return nothing;
}

static void by_another_thread(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, on_own_stream, NULL);
    pthread_join(thread, NULL);
}

static void per_thread(void)
{
    start();
    const CUstream captured = capturing(CU_STREAM_NON_BLOCKING);
    work_on(CU_STREAM_PER_THREAD);
    watch();
    end_capture(captured);
}

static void per_thread_beside_blocking(void)
{
    start();
    const CUstream captured = capturing(CU_STREAM_DEFAULT);
    by_another_thread();
    watch();
    end_capture(captured);
}

/* ---- Submitted before ---- */

static void per_thread_before(void)
{
    start();
    by_another_thread();
    const CUstream captured = capturing(CU_STREAM_DEFAULT);
    watch();
    end_capture(captured);
}

static void legacy_before_blocking(void)
{
    start();
    work_on(CU_STREAM_LEGACY);
    const CUstream captured = capturing(CU_STREAM_DEFAULT);
    watch();
    end_capture(captured);
}

/* The stream has work when its own capture begins, beside another one. */
static void second_capture(void)
{
    CUgraph graph;
    start();
    const CUstream captured = capturing(CU_STREAM_NON_BLOCKING), later = new_stream();
    work_on(later);
    OK(cuStreamBeginCapture(later, CU_STREAM_CAPTURE_MODE_RELAXED));
    watch();
    OK(cuStreamEndCapture(later, &graph));
    end_capture(captured);
}

/* The stream has work when it joins a capture. */
static void joined(void)
{
    CUevent fork, join;
    start();
    OK(cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING));
    OK(cuEventCreate(&join, CU_EVENT_DISABLE_TIMING));
    const CUstream captured = capturing(CU_STREAM_NON_BLOCKING), other = new_stream();
    work_on(other);
    OK(cuEventRecord(fork, captured));
    OK(cuStreamWaitEvent(other, fork, 0));
    watch();
    OK(cuEventRecord(join, other));
    OK(cuStreamWaitEvent(captured, join, 0));
    end_capture(captured);
}

/* ---- Ends ---- */

static void context_ends(void)
{
    CUcontext second;
    start();
    OK(cuCtxCreate(&second, NULL, 0, 0));
    (void)capturing(CU_STREAM_NON_BLOCKING);
    OK(cuCtxDestroy_v2(second));
    OK(cuCtxSetCurrent(primary));
    work_on(CU_STREAM_LEGACY);
    watch();
    OK(cuCtxSynchronize());
    CHECK(holds(memory, BYTES, AFTER), "work after a context's end was lost");
}

/* What is freed beside a capture is freed when its work is done. */
static void freed(void)
{
    start();
    const CUstream captured = capturing(CU_STREAM_NON_BLOCKING);
    const CUdeviceptr other = memory;
    memory = filled(BYTES, BEFORE);
    work_on(CU_STREAM_PER_THREAD);
    OK(cuMemsetD32Async(other, AFTER, BYTES / 4, CU_STREAM_PER_THREAD));
    OK(cuMemFree(other));
    CHECK(cuEventQuery(behind) == CUDA_SUCCESS, "memory is freed below its work");
    end_capture(captured);
}

/* ---- The other one, on a card ---- */

static void watcher(void)
{
    enum { MOST = 1 << 16 };
    static uint64_t rounds[MOST][2];
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    unsigned count = 0;
    begin();
    printf("ready\n");
    fflush(stdout);
    while (count < MOST && poll(&input, 1, 0) == 0) {
        rounds[count][0] = now_ns();
        OK(launch(NULL, 2000000));
        OK(cuCtxSynchronize());
        rounds[count++][1] = now_ns();
    }
    for (unsigned i = 0; i < count; i++)
        printf("%llu %llu\n", (unsigned long long)rounds[i][0], (unsigned long long)rounds[i][1]);
}

int main(int argc, char **argv)
{
    static const named_case cases[] = {
        {"legacy", legacy},
        {"null_stream", null_stream},
        {"per_thread", per_thread},
        {"per_thread_beside_blocking", per_thread_beside_blocking},
        {"per_thread_before", per_thread_before},
        {"legacy_before_blocking", legacy_before_blocking},
        {"second_capture", second_capture},
        {"joined", joined},
        {"context_ends", context_ends},
        {"freed", freed},
        {"watcher", watcher},
        {NULL, NULL},
    };
    return run_case(cases, argc, argv);
}
