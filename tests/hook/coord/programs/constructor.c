/* A library whose constructor computes on the GPU, under the loader's lock: two kernels, with a line of standard input between them. */
#include <cuda.h>
#include <stdint.h>
#include <unistd.h>

static const char image[] = ".version 8.0\n.target sm_90\n.address_size 64\n"
                            ".visible .entry nvs_busy(.param .u64 ns) { ret; }\n";

__attribute__((constructor)) static void compute(void)
{
    static const char said[] = "constructing\n", failed[] = "failed\n";
    CUmodule module;
    CUfunction busy;
    uint64_t ns = 1000;
    void *parameters[] = {&ns};
    char byte = 0;
    int bad = cuModuleLoadData(&module, image) != CUDA_SUCCESS || cuModuleGetFunction(&busy, module, "nvs_busy") != CUDA_SUCCESS ||
              cuLaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) != CUDA_SUCCESS ||
              write(STDOUT_FILENO, said, sizeof said - 1) < 0;
    while (!bad && byte != '\n')
        bad = read(STDIN_FILENO, &byte, 1) != 1;
    if (bad || cuLaunchKernel(busy, 1, 1, 1, 1, 1, 1, 0, NULL, parameters, NULL) != CUDA_SUCCESS)
        _exit(write(STDOUT_FILENO, failed, sizeof failed - 1) < 0 ? 8 : 9);
}
