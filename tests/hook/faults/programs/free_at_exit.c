/* Frees device memory in a destructor that exit() comes to when the driver has ended already, as libraries with static objects do.
 *
 * A destructor of the program runs behind the exit handlers that were registered later, by cuInit.
 */
#include <cuda.h>

#include <stdio.h>

static CUdeviceptr memory;

__attribute__((destructor)) static void free_late(void)
{
    printf("%d\n", (int)cuMemFree(memory));
    fflush(stdout);
}

int main(void)
{
    CUcontext context;
    if (cuInit(0) != CUDA_SUCCESS || cuDevicePrimaryCtxRetain(&context, 0) != CUDA_SUCCESS || cuCtxSetCurrent(context) != CUDA_SUCCESS)
        return 1;
    return cuMemAlloc(&memory, 64 << 20) != CUDA_SUCCESS || cuMemsetD8(memory, 1, 64 << 20) != CUDA_SUCCESS || cuCtxSynchronize() != CUDA_SUCCESS;
}
