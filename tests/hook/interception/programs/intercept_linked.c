/* A program that is linked with libcuda, as C programs are; run under the hook, with intercept_driver.c as libcuda.so.1. */
#define _GNU_SOURCE
#include "nvshare.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

typedef uintptr_t word;
int cuInit(unsigned flags);
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void *stream, void **parameters, void **extra);
int cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t bytes);
extern const char *intercept_name;
extern word intercept_arguments[];

static unsigned checks;

#define CHECK(condition, text)  \
    do {                        \
        checks++;               \
        if (!(condition))       \
            puts(text);         \
    } while (0)

static uint64_t gated(void)
{
    int (*state)(uint32_t, struct nvshare_gpu *);
    struct nvshare_gpu out = {.size = sizeof out};
    *(void **)&state = dlsym(RTLD_DEFAULT, "nvshare_gpu_state");
    CHECK(state != NULL && state(0, &out) == 0, "the hook is not there");
    return out.calls;
}

int main(void)
{
    void *parameters[1] = {NULL};
    CHECK(cuInit(0) == 0 && strcmp(intercept_name, "cuInit") == 0, "cuInit did not reach the driver");
    const uint64_t before = gated();
    cuLaunchKernel((void *)11, 1, 2, 3, 4, 5, 6, 7, (void *)0x8000, parameters, (void *)10);
    CHECK(strcmp(intercept_name, "cuLaunchKernel") == 0, "cuLaunchKernel did not reach the driver");
    CHECK(intercept_arguments[0] == 11 && (unsigned)intercept_arguments[7] == 7 && intercept_arguments[8] == 0x8000 &&
              intercept_arguments[9] == (word)parameters && intercept_arguments[10] == 10,
          "cuLaunchKernel: the arguments are not those that were passed");
    CHECK(gated() == before + 1, "cuLaunchKernel did not pass the gate once");
    CHECK(dlsym(RTLD_DEFAULT, "cuLaunchKernel") == (void *)(word)cuLaunchKernel, "dlsym and the linker do not agree");
    CHECK(dlsym(RTLD_NEXT, "cuLaunchKernel") == (void *)(word)cuLaunchKernel, "RTLD_NEXT leads past the hook");

    /* A child of fork goes on, and so does its parent. */
    fflush(stdout);
    const pid_t child = fork();
    if (child == 0)
        _exit(cuMemsetD8_v2(1, 2, 3) == 0 && strcmp(intercept_name, "cuMemsetD8_v2") == 0 ? 0 : 1);
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child && status == 0, "the child of a fork could not call the driver");
    CHECK(cuMemsetD8_v2(1, 2, 3) == 0 && strcmp(intercept_name, "cuMemsetD8_v2") == 0, "after a fork the parent could not");
    printf("done %u\n", checks);
    return 0;
}
