/* Frees device memory in a destructor that exit() comes to when the driver has ended already, as libraries with static objects do.
 *
 * A destructor of the program runs behind the exit handlers that were registered later, by cuInit.  There every call fails as a driver's does then.
 */
#include <cuda.h>

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static CUdeviceptr memory;

static void end_driver(void)
{
    static const char *const functions[] = {"cuCtxGetCurrent", "cuCtxPushCurrent",   "cuCtxSynchronize", "cuMemUnmap",
                                            "cuMemFree",       "cuMemAddressFree", "cuEventQuery",     "cuStreamQuery"};
    void *symbol = dlsym(RTLD_DEFAULT, "nvs_sim_fail");
    int (*fail)(const char *function, uint64_t nth, int result);
    memcpy(&fail, &symbol, sizeof fail);
    for (unsigned i = 0; fail != NULL && i < sizeof functions / sizeof *functions; i++)
        if (fail(functions[i], 0, CUDA_ERROR_DEINITIALIZED) != 0)
            _exit(3);
}

__attribute__((destructor)) static void free_late(void)
{
    end_driver();
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
