/* Its memory stays on the GPU for a time after the hook's exit handler: ends_slowly BYTES MILLISECONDS.  Prints the result
 * of its allocation, as JSON. */
#include "cuda_program.h"

static long long milliseconds;

static void linger(void)
{
    const struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    nanosleep(&time, NULL);
}

int main(int argc, char **argv)
{
    CUdeviceptr pointer;
    const size_t bytes = argc == 3 ? strtoull(argv[1], NULL, 10) : 0;
    milliseconds = argc == 3 ? atoll(argv[2]) : 0;
    if (bytes == 0 || atexit(linger) != 0) /* registered before the hook's, so it runs after it */
        return 2;
    begin();
    const CUresult result = cuMemAlloc(&pointer, bytes);
    if (result == CUDA_SUCCESS) {
        OK(cuMemsetD8(pointer, 1, bytes));
        OK(cuCtxSynchronize());
    }
    printf("{\"result\": %d}\n", (int)result);
    fflush(stdout);
    return complaints != 0;
}
