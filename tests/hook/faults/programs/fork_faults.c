/* Pages that a child of fork has to be given, on average: `fork_faults [cuda]`, with `cuda` after the program has used its GPU. */
#include <cuda.h>

#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CHILDREN = 50 };

static int use_gpu(void)
{
    CUcontext context;
    CUdeviceptr memory;
    if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS || cuCtxSetCurrent(context) != CUDA_SUCCESS)
        return 1;
    return cuMemAlloc(&memory, 4096) != CUDA_SUCCESS || cuMemsetD8(memory, 1, 4096) != CUDA_SUCCESS || cuCtxSynchronize() != CUDA_SUCCESS;
}

int main(int argc, char **argv)
{
    struct rusage used;
    if (argc > 1 && strcmp(argv[1], "cuda") == 0 && use_gpu() != 0)
        return 1;
    for (int i = 0; i < CHILDREN; i++) {
        const pid_t child = fork();
        if (child == 0)
            _exit(0);
        if (child < 0 || waitpid(child, NULL, 0) != child)
            return 1;
    }
    if (getrusage(RUSAGE_CHILDREN, &used) != 0)
        return 1;
    printf("%ld\ngood\n", used.ru_minflt / CHILDREN);
    return 0;
}
