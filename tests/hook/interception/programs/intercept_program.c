/* What an application sees of the hook's interception; run under the hook, with intercept_driver.c as its libcuda.so.1.
 *
 * intercept_program MODE prints one line for each thing that is not as it must be, then "done N" with the number of checks.
 * Compiled with the CUDA_VERSION of the hook's cuda.h, so that both know the same rows.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvshare.h"

typedef uintptr_t word;
typedef int function(word, word, word, word, word, word, word, word, word, word, word, word, word, word);

enum kind { GATED, CUSTOM, PASS, THUNK };
static const struct row {
    const char *name;
    int since;
    enum kind kind;
    const char *arguments;
} rows[] = {
#define NVS_STREAM(symbol, since, parameters, arguments, stream) {#symbol, since, GATED, #arguments},
#define NVS_CURRENT(symbol, since, parameters, arguments) {#symbol, since, GATED, #arguments},
#define NVS_CUSTOM(symbol, since) {#symbol, since, CUSTOM, ""},
#define NVS_PASS(symbol, since, reason) {#symbol, since, PASS, ""},
#define NVS_THUNK(symbol, since, reason) {#symbol, since, THUNK, ""},
#define NVS_FOREIGN(symbol, since, reason) {#symbol, since, PASS, ""},
#include "driver/cuda_api.def"
};
enum { ROWS = sizeof rows / sizeof rows[0] };

#if defined(__x86_64__)
#define LIBC "GLIBC_2.2.5" /* the first version of its first functions */
#else
#define LIBC "GLIBC_2.17"
#endif

static unsigned checks;
static void *driver;

#define CHECK(condition, ...)         \
    do {                              \
        checks++;                     \
        if (!(condition)) {           \
            printf(__VA_ARGS__);      \
            putchar('\n');            \
        }                             \
    } while (0)

/* The driver's own address of a function, by a way that no hook sees: its variable beside its function. */
static void *raw(const char *name)
{
    void *(*find)(const char *);
    *(void **)&find = dlsym(driver, "intercept_address");
    return find(name);
}

static const char *reached(void)
{
    return *(const char **)dlsym(driver, "intercept_name");
}

static unsigned count_arguments(const char *text)
{
    unsigned count = strcmp(text, "()") != 0;
    for (; *text != 0; text++)
        count += *text == ',';
    return count;
}

static int call(void *address)
{
    static char buffer[4096]; /* the first argument may be a structure that is looked into */
    return ((function *)(word)address)((word)buffer, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13);
}

/* With nothing to look into: for functions that would, and must let the driver complain. */
static int call_with_nothing(void *address)
{
    return ((function *)(word)address)(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}

/* Calling `address` reaches the driver's function of this name with what was passed. */
static void check_call(const char *name, void *address, unsigned arguments)
{
    const word *passed = dlsym(driver, "intercept_arguments");
    int *result = dlsym(driver, "intercept_result");
    *result = 7;
    CHECK(call(address) == 7, "%s: its result is not the driver's", name);
    *result = 0;
    CHECK(strcmp(reached(), name) == 0, "%s: %s was reached", name, reached());
    for (unsigned i = 1; i < arguments; i++)
        CHECK((uint8_t)passed[i] == i, "%s: argument %u arrived as %#lx", name, i, (unsigned long)passed[i]);
}

static void look_up(void)
{
    for (unsigned i = 0; i < ROWS; i++) {
        const char *name = rows[i].name;
        void *own = raw(name), *found = dlsym(driver, name);
        CHECK((found == own) == (rows[i].kind == PASS), "%s: dlsym gives %s", name, found == own ? "the driver's" : "a wrapper");
        CHECK(dlsym(driver, name) == found, "%s: dlsym gives something else the second time", name);
        if (rows[i].kind == PASS)
            continue;
        for (int again = 0; again < 2; again++) {
            CHECK(dlsym(RTLD_DEFAULT, name) == found, "%s: not the wrapper with RTLD_DEFAULT", name);
            CHECK(dlsym(RTLD_NEXT, name) == found, "%s: not the wrapper with RTLD_NEXT", name);
        }
        if (rows[i].kind == GATED)
            check_call(name, found, count_arguments(rows[i].arguments));
        if (rows[i].kind == THUNK)
            check_call(name, found, 14);
    }
    CHECK(dlsym(RTLD_DEFAULT, "printf") == dlsym(RTLD_NEXT, "printf") && dlsym(RTLD_NEXT, "printf") != NULL,
          "a function that is not CUDA's: not libc's answer");
    CHECK(dlsym(driver, "cuNoSuchThing") == NULL, "a function that nobody has was found");
    dlerror();
    CHECK(dlsym(driver, "cuCtxGetDevice") != NULL && dlerror() == NULL, "a look-up that succeeded left an error behind");
    CHECK(dlvsym(RTLD_DEFAULT, "printf", LIBC) != NULL && dlvsym(RTLD_DEFAULT, "printf", "GLIBC_0.1") == NULL,
          "dlvsym: not libc's answer");
}

static void *translated(const char *name, int version, uint64_t flags)
{
    int (*resolve)(const char *, void **, int, uint64_t, int *);
    void *out = NULL;
    int status = 9;
    *(void **)&resolve = dlsym(driver, "cuGetProcAddress_v2");
    resolve(name, &out, version, flags, &status);
    CHECK((status == 0) == (out != NULL), "%s: status %d beside %p", name, status, out);
    return out;
}

static void *untranslated(const char *name, int version, uint64_t flags)
{
    int (*resolve)(const char *, void **, int, uint64_t, int *);
    void *out = NULL;
    *(void **)&resolve = raw("cuGetProcAddress_v2");
    resolve(name, &out, version, flags, NULL);
    return out;
}

/* A function of unknown signature: its thunk must hand on every register and the stack, and the result in either kind of register. */
static void check_thunk_keeps_everything(void)
{
    double (*f)(double, word, double, word, double, word, double, word, double, word, double, word, double, word, double, word, double, word);
    const word *passed = dlsym(driver, "intercept_arguments");
    *(void **)&f = translated("cuLaunchNextVectors", 14000, 0);
    CHECK(*(void **)&f != raw("cuLaunchNextVectors"), "an unknown launching function with vectors is not gated");
    const double sum = f(1, 10, 2, 11, 3, 12, 4, 13, 5, 14, 6, 15, 7, 16, 8, 17, 9, 18);
    CHECK(sum == 1 + 4 + 12 + 32 + 80 + 192 + 448 + 1024 + 2304, "a thunk changes numbers in vectors: %g", sum);
    for (unsigned i = 0; i < 9; i++)
        CHECK(passed[i] == 10 + i, "a thunk changes argument %u to %#lx", i, (unsigned long)passed[i]);
}

static void by_proc_address(void)
{
    check_thunk_keeps_everything();
    static void *own_of[ROWS], *found_of[ROWS];
    for (unsigned i = 0; i < ROWS; i++) {
        own_of[i] = raw(rows[i].name);
        found_of[i] = dlsym(driver, rows[i].name);
    }
    static const int versions[] = {2000, 3020, 7000, 11030, 12000, 13000, 99990};
    for (unsigned i = 0; i < ROWS; i++)
        for (unsigned v = 0; v < sizeof versions / sizeof versions[0]; v++)
            for (uint64_t flags = 0; flags < 3; flags++) {
                void *own = untranslated(rows[i].name, versions[v], flags), *got = translated(rows[i].name, versions[v], flags);
                CHECK((own == NULL) == (got == NULL), "%s: found and not found", rows[i].name);
                for (unsigned k = 0; own != NULL && k < ROWS; k++)
                    if (own_of[k] == own)
                        CHECK(got == found_of[k], "%s at %d, flags %d: not what dlsym gives for %s", rows[i].name,
                              versions[v], (int)flags, rows[k].name);
            }
    void *next = translated("cuLaunchNextGeneration", 14000, 0);
    CHECK(next != NULL && next != raw("cuLaunchNextGeneration"), "an unknown launching function is not gated");
    check_call("cuLaunchNextGeneration", next, 14);
    CHECK(translated("cuMemcpyNextGenerationAsync", 14000, 0) == dlsym(driver, "cuMemcpyNextGenerationAsync"),
          "two ways to an unknown copying function lead to two thunks");
    CHECK(translated("cuNextGenerationGetState", 14000, 0) == raw("cuNextGenerationGetState"), "an unknown query is not let through");
    int (*old)(const char *, void **, int, uint64_t);
    void *out = NULL;
    *(void **)&old = translated("cuGetProcAddress", 11030, 0);
    CHECK(*(void **)&old == dlsym(driver, "cuGetProcAddress"), "the resolver of 11.3 is not the one with four arguments");
    CHECK(old("cuLaunchKernel", &out, 11030, 0) == 0 && out == dlsym(driver, "cuLaunchKernel"), "the resolver of 11.3 does not translate");
    CHECK(translated("cuGetProcAddress", 12000, 0) == dlsym(driver, "cuGetProcAddress_v2"), "the resolver of 12.0 is not the one with five");
}

static void without_driver(void)
{
    void *self = dlopen(NULL, RTLD_LAZY), *const handles[] = {RTLD_DEFAULT, RTLD_NEXT, self};
    for (unsigned i = 0; i < 3; i++) {
        dlerror();
        CHECK(dlsym(handles[i], "cuInit") == NULL, "without a driver cuInit is found (handle %u)", i);
        const char *error = dlerror();
        CHECK(error != NULL && strstr(error, "cuInit") != NULL, "no message in dlerror (handle %u)", i);
        CHECK(dlsym(handles[i], "cuLaunchKernel") == NULL, "without a driver cuLaunchKernel is found (handle %u)", i);
        CHECK(dlvsym(handles[i], "cuInit", LIBC) == NULL, "dlvsym finds cuInit without a driver (handle %u)", i);
    }
    CHECK(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY) == NULL, "the hook has loaded the driver");
}

/* How many calls the hook has let through its gate of this GPU. */
static uint64_t gated(uint32_t gpu)
{
    int (*state)(uint32_t, struct nvshare_gpu *);
    struct nvshare_gpu out = {.size = sizeof out};
    *(void **)&state = dlsym(RTLD_DEFAULT, "nvshare_gpu_state");
    CHECK(state != NULL && state(gpu, &out) == 0, "the hook is not there");
    return out.calls;
}

static int invoke(const char *name, word first, word second)
{
    return ((function *)(word)dlsym(driver, name))(first, second, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}

static void through_the_gate(void)
{
    CHECK(invoke("cuInit", 0, 0) == 0, "cuInit failed");
    for (unsigned i = 0; i < ROWS; i++) {
        if (rows[i].kind != GATED && rows[i].kind != THUNK)
            continue;
        const uint64_t before = gated(0);
        call(dlsym(driver, rows[i].name));
        CHECK(gated(0) - before == 1, "%s passed the gate %d times", rows[i].name, (int)(gated(0) - before));
    }
}

/* A call of `name` passes the gate of this GPU and no other. */
static void check_gpu(const char *name, word first, word second, uint32_t gpu, const char *why)
{
    uint64_t before[4];
    for (uint32_t i = 0; i < 4; i++)
        before[i] = gated(i);
    invoke(name, first, second);
    for (uint32_t i = 0; i < 4; i++)
        CHECK(gated(i) - before[i] == (i == gpu), "%s: %s passed the gate of GPU %u %d times", why, name, i, (int)(gated(i) - before[i]));
}

static void several_gpus(void)
{
    int *current = dlsym(driver, "intercept_current"), *shift = dlsym(driver, "intercept_shift");
    invoke("cuInit", 0, 0);
    *current = 2;
    check_gpu("cuMemsetD8_v2", 1, 1, 2, "current context");
    check_gpu("cuMemsetD8_v2", 1, 1, 2, "current context, again");
    check_gpu("cuGraphLaunch", 1, 0x3000, 3, "stream of another GPU");
    check_gpu("cuGraphLaunch", 1, 0x3000, 3, "the same stream");
    check_gpu("cuGraphLaunch", 1, 0x1000, 1, "another stream");
    check_gpu("cuGraphLaunch", 1, 0, 2, "null stream");
    check_gpu("cuGraphLaunch_ptsz", 1, 0, 2, "per-thread default stream");
    check_gpu("cuGraphLaunch", 1, 1, 2, "CU_STREAM_LEGACY");
    check_gpu("cuGraphLaunch", 1, 2, 2, "CU_STREAM_PER_THREAD");
    *current = 1;
    invoke("cuCtxSetCurrent", 0x101, 0);
    check_gpu("cuGraphLaunch", 1, 0, 1, "after cuCtxSetCurrent");
    invoke("cuCtxPushCurrent_v2", 0x103, 0);
    check_gpu("cuMemsetD8_v2", 1, 1, 3, "after cuCtxPushCurrent");
    word popped;
    invoke("cuCtxPopCurrent_v2", (word)&popped, 0);
    check_gpu("cuMemsetD8_v2", 1, 1, 1, "after cuCtxPopCurrent");
    check_gpu("cuGraphLaunch", 1, 0x3000, 3, "a stream, before its end");
    *shift = 6;
    invoke("cuStreamDestroy_v2", 0x3000, 0);
    check_gpu("cuGraphLaunch", 1, 0x3000, 1, "its handle, given to a stream of another GPU");
    *current = 0;
    for (unsigned i = 0; i < 100; i++)
        invoke("cuMemsetD8_v2", 1, 1);
    check_gpu("cuMemsetD8_v2", 1, 1, 0, "a context made current behind the hook's back");
}

/* With a driver that does not export cuLaunchKernelEx and cuMemsetD8Async, but gives them to those who ask by version. */
static void unexported(void)
{
    CHECK(dlsym(driver, "cuLaunchKernelEx") == NULL, "a function that the driver does not export is found");
    CHECK(dlsym(RTLD_DEFAULT, "cuLaunchKernelEx") == NULL, "a function that the driver does not export is found with RTLD_DEFAULT");
    CHECK(dlerror() != NULL, "and there is no message");
    void *launch = translated("cuLaunchKernelEx", 13000, 0), *set = translated("cuMemsetD8Async", 13000, 0);
    CHECK(launch != NULL && launch != untranslated("cuLaunchKernelEx", 13000, 0), "cuLaunchKernelEx is handed out raw");
    CHECK(set != NULL && set != untranslated("cuMemsetD8Async", 13000, 0), "cuMemsetD8Async is handed out raw");
    const uint64_t before = gated(0);
    check_call("cuLaunchKernelEx", launch, 4);
    check_call("cuMemsetD8Async", set, 4);
    CHECK(gated(0) - before == 2, "a function that is not exported does not pass the gate");
}

/* The hook's own function of this name, which only a program that is linked with libcuda would have. */
static void *wrapper_of(const char *name)
{
    void *(*real)(void *, const char *);
    Dl_info hook;
    *(void **)&real = dlsym(dlopen("libc.so.6", RTLD_LAZY), "dlsym"); /* libc's, which does not translate */
    CHECK(dladdr(dlsym(RTLD_DEFAULT, "nvshare_gpu_state"), &hook) != 0, "the hook is not there");
    return real(dlopen(hook.dli_fname, RTLD_NOLOAD | RTLD_LAZY), name);
}

static void check_launch_is_gated(void)
{
    const uint64_t before = gated(0);
    check_call("cuLaunchKernel", dlsym(driver, "cuLaunchKernel"), 11);
    CHECK(gated(0) - before == 1, "after all that a launch does not pass the gate once");
}

/* With a driver of CUDA 12.1: what came later is absent, and a call of it all the same is an error like any other. */
static void older(void)
{
    enum { DRIVER = 12010 };
    for (unsigned i = 0; i < ROWS; i++) {
        const char *name = rows[i].name;
        const bool there = rows[i].since <= DRIVER;
        CHECK((dlsym(driver, name) != NULL) == there, "%s: dlsym %s", name, there ? "does not find it" : "finds it");
        const bool anywhere = there && rows[i].kind != PASS; /* the driver was opened for us alone */
        CHECK((dlsym(RTLD_DEFAULT, name) != NULL) == anywhere, "%s: dlsym with RTLD_DEFAULT %s", name, there ? "does not find it" : "finds it");
        CHECK((dlsym(RTLD_NEXT, name) != NULL) == anywhere, "%s: dlsym with RTLD_NEXT %s", name, there ? "does not find it" : "finds it");
        dlerror();
        for (uint64_t flags = 0; flags < 3; flags++) {
            void *own = untranslated(name, 13000, flags), *got = translated(name, 13000, flags);
            CHECK((own == NULL) == (got == NULL), "%s: found and not found", name);
            CHECK(own == NULL || got != own || rows[i].kind == PASS, "%s: handed out raw", name);
        }
        void *wrapper = rows[i].kind == GATED || rows[i].kind == CUSTOM ? wrapper_of(name) : NULL;
        if (there || wrapper == NULL)
            continue;
        const int said = call_with_nothing(wrapper);
        CHECK(said == 801, "%s: a function that the driver lacks says %d", name, said);
    }
    check_launch_is_gated();
}

static void *resolve_all(void *argument)
{
    pthread_barrier_wait(argument);
    for (unsigned i = 0; i < ROWS; i++)
        for (uint64_t flags = 0; flags < 3; flags++)
            translated(rows[i].name, 13000, flags);
    return translated("cuLaunchKernel", 13000, 0);
}

static void in_threads(void)
{
    enum { THREADS = 8 };
    pthread_t threads[THREADS];
    pthread_barrier_t barrier;
    pthread_barrier_init(&barrier, NULL, THREADS);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, resolve_all, &barrier);
    for (unsigned i = 0; i < THREADS; i++) {
        void *got = NULL;
        pthread_join(threads[i], &got);
        CHECK(got == dlsym(driver, "cuLaunchKernel"), "a thread got something else");
    }
    checks = THREADS; /* those of the threads are not counted reliably */
}

static const struct mode {
    const char *name;
    void (*run)(void);
} modes[] = {
    {"look_up", look_up}, {"by_proc_address", by_proc_address}, {"in_threads", in_threads}, {"older", older},
    {"through_the_gate", through_the_gate}, {"several_gpus", several_gpus}, {"unexported", unexported}, {"without_driver", without_driver},
};

int main(int argc, char **argv)
{
    const char *mode = argc > 1 ? argv[1] : "";
    if (strcmp(mode, "without_driver") != 0 && (driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL)) == NULL) {
        printf("%s\n", dlerror());
        return 1;
    }
    for (unsigned i = 0; i < sizeof modes / sizeof modes[0]; i++)
        if (strcmp(mode, modes[i].name) == 0)
            modes[i].run();
    printf("done %u\n", checks);
    return 0;
}
