/* Another preload of the user's: it counts launches, and calls the next library. */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>

static unsigned launches;

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, CUstream stream,
                        void **parameters, void **extra)
{
    static __typeof__(&cuLaunchKernel) next;
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "cuLaunchKernel");
    launches++;
    return next(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}

__attribute__((destructor)) static void tell(void)
{
    __typeof__(&cuLaunchKernel) found;
    *(void **)&found = dlsym(RTLD_DEFAULT, "cuLaunchKernel");
    fprintf(stderr, "%u launches, %s\n", launches, found == cuLaunchKernel ? "first" : "not first");
}
