/* A context that ends again and again while memory of another one moves: what the hook copies with went with the first.
 *
 * Says "ready".  In: a line, out: the CUresult.  "make": a context with many allocations, beside another that stays, with a thread that makes
 * and ends streams in it; "fill": what the other has; "end": the first; "lost": how many streams of that thread were not there any more.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

enum { ALLOCATIONS = 50, STREAMS = 16, LOOKS = 30 };
static const size_t own_bytes = (size_t)16 << 20, each_bytes = (size_t)2 << 20;

static CUcontext ends, stays;
static CUdeviceptr own;
static atomic_ulong lost;

static void *make_streams(void *nothing)
{
    CUstream all[STREAMS];
    (void)cuCtxSetCurrent(stays);
    for (;;) {
        for (int i = 0; i < STREAMS; i++)
            if (cuStreamCreate(&all[i], CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
                all[i] = NULL;
        for (int i = 0; i < LOOKS * STREAMS; i++)
            if (all[i % STREAMS] != NULL && cuStreamQuery(all[i % STREAMS]) != CUDA_SUCCESS) {
                atomic_fetch_add_explicit(&lost, 1, memory_order_relaxed); /* a count */
                all[i % STREAMS] = NULL;
            }
        for (int i = 0; i < STREAMS; i++)
            if (all[i] != NULL)
                (void)cuStreamDestroy(all[i]);
    }
    return nothing;
}

static int make(void)
{
    CUcontext popped;
    CUdeviceptr memory;
    pthread_t thread;
    int failed = (int)cuInit(0) | (int)cuCtxCreate(&ends, NULL, 0, 0);
    for (int i = 0; i < ALLOCATIONS && failed == 0; i++)
        failed = (int)cuMemAlloc(&memory, each_bytes);
    failed |= (int)cuCtxPopCurrent(&popped);
    if (stays == NULL && failed == 0)
        failed = (int)cuCtxCreate(&stays, NULL, 0, 0) | (int)cuMemAlloc(&own, own_bytes) | pthread_create(&thread, NULL, make_streams, NULL);
    return failed;
}

int main(void)
{
    char line[16];
    setvbuf(stdout, NULL, _IOLBF, 0);
    puts("ready");
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (strcmp(line, "make\n") == 0)
            printf("%d\n", make());
        else if (strcmp(line, "fill\n") == 0)
            printf("%d\n", (int)cuMemsetD8(own, 1, own_bytes));
        else if (strcmp(line, "end\n") == 0)
            printf("%d\n", (int)cuCtxDestroy(ends));
        else
            printf("%lu\n", atomic_load_explicit(&lost, memory_order_relaxed));
    }
    return 0;
}
