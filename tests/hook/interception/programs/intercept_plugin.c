/* A library that a program opens as it likes: linked with libcuda, and looking functions up by itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

typedef uintptr_t word;
typedef int launch_function(word, word, word, word, word, word, word, word, word, word, word, word, word, word);
int cuInit(unsigned flags);
int cuMemsetD8_v2(unsigned long long pointer, unsigned char value, size_t bytes);
int cuMemcpyHtoD_v2(unsigned long long pointer, const void *from, size_t bytes);
extern const char *intercept_name;

static int (*const in_data)(unsigned long long, const void *, size_t) = cuMemcpyHtoD_v2; /* a pointer that the loader fills in */

/* Calls in four ways; how many did not reach the driver's function of that name. */
__attribute__((visibility("default"))) int plugin_call(void)
{
    int wrong = 0;
    launch_function *launch;
    int (*resolve)(const char *, void **, int, uint64_t, int *);
    int status;
    cuInit(0);
    wrong += cuMemsetD8_v2(1, 2, 3) != 0 || strcmp(intercept_name, "cuMemsetD8_v2") != 0;
    wrong += in_data(1, "x", 1) != 0 || strcmp(intercept_name, "cuMemcpyHtoD_v2") != 0;
    *(void **)&launch = dlsym(RTLD_DEFAULT, "cuLaunchKernelEx");
    wrong += launch == NULL || launch((word) "", 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0 || strcmp(intercept_name, "cuLaunchKernelEx") != 0;
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    *(void **)&resolve = dlsym(driver, "cuGetProcAddress_v2");
    launch = NULL;
    wrong += resolve == NULL || resolve("cuGraphLaunch", (void **)&launch, 12000, 0, &status) != 0;
    wrong += launch == NULL || launch(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0) != 0 || strcmp(intercept_name, "cuGraphLaunch") != 0;
    return wrong;
}
