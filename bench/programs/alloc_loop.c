/* What cuMemAlloc and cuMemFree cost: so many allocations of a size are made, then all are freed, again and again.
 *
 * usage: alloc_loop BYTES COUNT ROUNDS
 * Prints one JSON object: nanoseconds per allocation and per free of each round.
 *
 * The program knows nothing of the hook; it is run with and without it.  It works on the GPU before it measures, so that under the
 * hook it holds the lease: memory that is allocated without one costs nothing yet.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int (*cu_init)(unsigned);
static int (*cu_retain)(void **, int);
static int (*cu_set_current)(void *);
static int (*cu_alloc)(uint64_t *, size_t);
static int (*cu_free)(uint64_t);
static int (*cu_memset)(uint64_t, unsigned char, size_t);
static int (*cu_synchronize)(void);

static void *find(void *library, const char *name)
{
    void *symbol = dlsym(library, name);
    if (symbol == NULL) {
        fprintf(stderr, "%s: %s\n", name, dlerror());
        exit(1);
    }
    return symbol;
}

#define FIND(pointer, name)                                  \
    do {                                                     \
        void *found = find(library, name);                   \
        memcpy(&(pointer), &found, sizeof found);            \
    } while (0)

static double now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

static void check(const char *what, int result)
{
    if (result == 0)
        return;
    fprintf(stderr, "%s: error %d\n", what, result);
    exit(1);
}

static void print(const char *name, const double *values, unsigned count)
{
    printf("\"%s\": [", name);
    for (unsigned i = 0; i < count; i++)
        printf("%s%.1f", i == 0 ? "" : ", ", values[i]);
    printf("]");
}

int main(int count, char **words)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (count != 4 || library == NULL) {
        fprintf(stderr, "usage: alloc_loop BYTES COUNT ROUNDS, with libcuda.so.1\n");
        return 2;
    }
    FIND(cu_init, "cuInit");
    FIND(cu_retain, "cuDevicePrimaryCtxRetain");
    FIND(cu_set_current, "cuCtxSetCurrent");
    FIND(cu_alloc, "cuMemAlloc_v2");
    FIND(cu_free, "cuMemFree_v2");
    FIND(cu_memset, "cuMemsetD8_v2");
    FIND(cu_synchronize, "cuCtxSynchronize");
    const size_t bytes = strtoull(words[1], NULL, 10);
    const unsigned each = (unsigned)atoi(words[2]), rounds = (unsigned)atoi(words[3]);
    uint64_t *pointers = calloc(each, sizeof *pointers);
    double *made = calloc(rounds, sizeof *made), *freed = calloc(rounds, sizeof *freed);
    if (pointers == NULL || made == NULL || freed == NULL)
        return 1;
    check("cuInit", cu_init(0));
    check("cuDevicePrimaryCtxRetain", cu_retain(&context, 0));
    check("cuCtxSetCurrent", cu_set_current(context));
    uint64_t first;
    check("cuMemAlloc", cu_alloc(&first, 512));
    check("cuMemsetD8", cu_memset(first, 1, 512));
    check("cuCtxSynchronize", cu_synchronize());
    for (unsigned round = 0; round < rounds; round++) {
        double begin = now_ns();
        for (unsigned i = 0; i < each; i++)
            check("cuMemAlloc", cu_alloc(&pointers[i], bytes));
        double middle = now_ns();
        for (unsigned i = 0; i < each; i++)
            check("cuMemFree", cu_free(pointers[i]));
        made[round] = (middle - begin) / each;
        freed[round] = (now_ns() - middle) / each;
    }
    printf("{");
    print("alloc_ns", made, rounds);
    printf(", ");
    print("free_ns", freed, rounds);
    printf("}\n");
    return 0;
}
