/* The same kernels over memory in chunks (mode `swap`) and over the driver's own, in one process: the program of nvshare.bench.resident.
 *
 * usage: resident_loop BYTES [LIBCUBLAS]
 *
 * Four sets of three buffers of BYTES each: swap-0 and swap-1 are allocated as any program does, so through the hook; plain-0 and
 * plain-1 by the driver's own cuMemAlloc, which the hook does not see.  They take turns in being allocated.  Speaks the line protocol
 * of bench/crew.py; NAME is KERNEL:SET, KERNEL one of copy, triad, gather (random words of a whole buffer), matmul (by cuBLAS).
 * `about` tells how much of a buffer the driver takes for one allocation, in either kind: that is the proof that they differ.
 */
#define _GNU_SOURCE /* the headers */
#include "driver_program.h"
#include "driver_symbol.h"

#include <string.h>

enum { SETS = 4, BUFFERS = 3, BLOCK = 256, DIGEST_BYTES = 1 << 20, MATRIX = 8192, HALVES = 2 };
enum { R_16BF = 14, COMPUTE_32F = 68, DEFAULT_ALGORITHM = -1 }; /* of cuBLAS */

static const char *const set_names[SETS] = {"swap-0", "plain-0", "plain-1", "swap-1"};
static const char *const kernel_names[] = {"fill", "copy", "triad", "gather"};
enum { FILL, COPY, TRIAD, GATHER, KERNELS };

/* All take (a, b, c, mask of words); a thread of fill and gather does one word, of copy and triad four. */
#define ENTRY(name)                                                                                                  \
    ".visible .entry " name "(.param .u64 pa, .param .u64 pb, .param .u64 pc, .param .u32 pm)\n{\n"                   \
    "  .reg .u64 %a<4>;\n  .reg .u64 %o;\n  .reg .u32 %r<8>;\n  .reg .f32 %f<9>;\n"                                   \
    "  ld.param.u64 %a1, [pa];\n  ld.param.u64 %a2, [pb];\n  ld.param.u64 %a3, [pc];\n  ld.param.u32 %r7, [pm];\n"    \
    "  cvta.to.global.u64 %a1, %a1;\n  cvta.to.global.u64 %a2, %a2;\n  cvta.to.global.u64 %a3, %a3;\n"               \
    "  mov.u32 %r1, %ctaid.x;\n  mov.u32 %r2, %ntid.x;\n  mov.u32 %r3, %tid.x;\n  mad.lo.u32 %r1, %r1, %r2, %r3;\n"
#define SCATTER                                                                                                      \
    "  mul.lo.u32 %r2, %r1, 0x9E3779B1U;\n  shr.u32 %r3, %r2, 15;\n  xor.b32 %r2, %r2, %r3;\n"                         \
    "  mul.lo.u32 %r2, %r2, 0x85EBCA77U;\n  shr.u32 %r3, %r2, 13;\n  xor.b32 %r2, %r2, %r3;\n"

static const char image[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ENTRY("fill") SCATTER /* pairs of small positive bf16 */
    "  and.b32 %r2, %r2, 0x3F7F3F7FU;\n"
    "  mul.wide.u32 %o, %r1, 4;\n  add.u64 %a1, %a1, %o;\n  add.u64 %a2, %a2, %o;\n"
    "  st.global.u32 [%a1], %r2;\n  st.global.u32 [%a2], %r2;\n  ret;\n}\n"
    ENTRY("copy")
    "  mul.wide.u32 %o, %r1, 16;\n  add.u64 %a1, %a1, %o;\n  add.u64 %a3, %a3, %o;\n"
    "  ld.global.v4.u32 {%r2, %r3, %r4, %r5}, [%a1];\n  st.global.v4.u32 [%a3], {%r2, %r3, %r4, %r5};\n  ret;\n}\n"
    ENTRY("triad")
    "  mul.wide.u32 %o, %r1, 16;\n  add.u64 %a1, %a1, %o;\n  add.u64 %a2, %a2, %o;\n  add.u64 %a3, %a3, %o;\n"
    "  ld.global.v4.f32 {%f1, %f2, %f3, %f4}, [%a1];\n  ld.global.v4.f32 {%f5, %f6, %f7, %f8}, [%a2];\n"
    "  fma.rn.f32 %f1, %f5, 0f40400000, %f1;\n  fma.rn.f32 %f2, %f6, 0f40400000, %f2;\n"
    "  fma.rn.f32 %f3, %f7, 0f40400000, %f3;\n  fma.rn.f32 %f4, %f8, 0f40400000, %f4;\n"
    "  st.global.v4.f32 [%a3], {%f1, %f2, %f3, %f4};\n  ret;\n}\n"
    ENTRY("gather") SCATTER
    "  and.b32 %r2, %r2, %r7;\n  mul.wide.u32 %o, %r2, 4;\n  add.u64 %a1, %a1, %o;\n  ld.global.u32 %r4, [%a1];\n"
    "  mul.wide.u32 %o, %r1, 4;\n  add.u64 %a3, %a3, %o;\n  st.global.u32 [%a3], %r4;\n  ret;\n}\n";

static int (*own_range)(uint64_t *, size_t *, uint64_t); /* the driver's own, as the next */
static int (*own_allocate)(uint64_t *, size_t);
static int (*gemm)(void *, int, int, int, int, int, const float *, const void *, int, int, const void *, int, int, const float *,
                   void *, int, int, int, int);

static void *functions[KERNELS], *cublas;
static uint64_t buffers[SETS][BUFFERS];
static size_t bytes;
static int side; /* of the matrices */

typedef struct named {
    const char *name;
    void *address;
} named;

static int is_it(const char *name, void *address, void *argument)
{
    named *want = argument;
    if (strcmp(name, want->name) == 0)
        want->address = address;
    return want->address != NULL;
}

static void *driver_own(const char *name)
{
    named want = {name, NULL};
    if (driver_each_symbol(is_it, &want) == 0) {
        fprintf(stderr, "resident_loop: the driver's symbol table has no %s\n", name);
        exit(1);
    }
    return want.address;
}

static void launch(int kernel, int set)
{
    uint32_t mask = (uint32_t)(bytes / 4 - 1);
    void *arguments[] = {&buffers[set][0], &buffers[set][1], &buffers[set][2], &mask};
    const size_t threads = kernel == FILL ? bytes / 4 : bytes / 16;
    check(cu_launch(functions[kernel], (unsigned)(threads / BLOCK), 1, 1, BLOCK, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
}

static void multiply(int set)
{
    const float one = 1, zero = 0;
    const void *left = (const void *)(uintptr_t)buffers[set][0], *right = (const void *)(uintptr_t)buffers[set][1];
    check(gemm(cublas, 0, 0, side, side, side, &one, left, R_16BF, side, right, R_16BF, side, &zero, (void *)(uintptr_t)buffers[set][2],
               R_16BF, side, COMPUTE_32F, DEFAULT_ALGORITHM),
          "cublasGemmEx");
}

static void find_cublas(const char *path)
{
    void *found = dlopen(path, RTLD_NOW);
    int (*create)(void **), (*set_stream)(void *, void *);
    if (found == NULL) {
        fprintf(stderr, "resident_loop: %s\n", dlerror());
        exit(1);
    }
    *(void **)&create = symbol(found, "cublasCreate_v2");
    *(void **)&set_stream = symbol(found, "cublasSetStream_v2");
    *(void **)&gemm = symbol(found, "cublasGemmEx");
    check(create(&cublas), "cublasCreate");
    check(set_stream(cublas, stream), "cublasSetStream");
}

static void set_up(const char *path)
{
    open_driver(image);
    *(void **)&own_allocate = driver_own("cuMemAlloc_v2");
    *(void **)&own_range = driver_own("cuMemGetAddressRange_v2");
    for (int kernel = 0; kernel < KERNELS; kernel++)
        functions[kernel] = kernel_of_module(kernel_names[kernel]);
    for (int buffer = 0; buffer < BUFFERS; buffer++)
        for (int set = 0; set < SETS; set++) {
            const int plain = strncmp(set_names[set], "plain", 5) == 0;
            check((plain ? own_allocate : cu_allocate)(&buffers[set][buffer], bytes), "cuMemAlloc");
        }
    for (int set = 0; set < SETS; set++)
        launch(FILL, set);
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
    for (side = MATRIX; (size_t)side * side * HALVES > bytes; side /= 2)
        ;
    if (path != NULL)
        find_cublas(path);
}

/* The largest piece that the driver allocated at once in any buffer of a kind. */
static size_t largest_piece(const char *kind)
{
    size_t largest = 0;
    for (int set = 0; set < SETS; set++)
        for (int buffer = 0; buffer < BUFFERS && strncmp(set_names[set], kind, strlen(kind)) == 0; buffer++) {
            uint64_t base;
            size_t size;
            check(own_range(&base, &size, buffers[set][buffer]), "cuMemGetAddressRange");
            largest = size > largest ? size : largest;
        }
    return largest;
}

static void step(int kernel, int set)
{
    if (kernel == KERNELS)
        multiply(set);
    else
        launch(kernel, set);
}

static uint64_t digest(int kernel, int set)
{
    static unsigned char host[DIGEST_BYTES];
    const size_t length = bytes < sizeof host ? bytes : sizeof host;
    uint64_t value = 14695981039346656037u;
    step(kernel, set);
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
    check(cu_copy_out(host, buffers[set][2], length), "cuMemcpyDtoH");
    for (size_t i = 0; i < length; i++)
        value = (value ^ host[i]) * 1099511628211u;
    return value;
}

/* KERNEL:SET; 0 when there is no such thing. */
static int parse(const char *name, int *kernel, int *set)
{
    const char *colon = strchr(name, ':');
    const size_t length = colon != NULL ? (size_t)(colon - name) : 0;
    *kernel = *set = -1;
    for (int i = COPY; i < KERNELS; i++)
        if (strlen(kernel_names[i]) == length && strncmp(name, kernel_names[i], length) == 0)
            *kernel = i;
    if (cublas != NULL && length == strlen("matmul") && strncmp(name, "matmul", length) == 0)
        *kernel = KERNELS;
    for (int i = 0; colon != NULL && i < SETS; i++)
        if (strcmp(set_names[i], colon + 1) == 0)
            *set = i;
    return *kernel >= 0 && *set >= 0;
}

int main(int count, char **arguments)
{
    char line[128], name[32] = "";
    unsigned long steps = 0;
    int kernel, set;
    if (count < 2 || (bytes = strtoull(arguments[1], NULL, 10)) < 1 << 16 || (bytes & (bytes - 1)) != 0) {
        fprintf(stderr, "usage: resident_loop BYTES [LIBCUBLAS], BYTES a power of two and at least 65536\n");
        return 2;
    }
    puts("{\"ready\": true}");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin) != NULL) {
        if (library == NULL)
            set_up(count > 2 ? arguments[2] : NULL);
        if (strncmp(line, "about", 5) == 0) {
            printf("{\"swap_piece_bytes\": %zu, \"plain_piece_bytes\": %zu, \"matrix\": %d}\n", largest_piece("swap"),
                   largest_piece("plain"), side);
        } else if (sscanf(line, "check %31s", name) == 1 && parse(name, &kernel, &set)) {
            printf("{\"digest\": \"%016llx\"}\n", (unsigned long long)digest(kernel, set));
        } else if (sscanf(line, "time %31s %lu", name, &steps) == 2 && parse(name, &kernel, &set)) {
            const uint64_t begin = now_ns();
            for (unsigned long i = 0; i < steps; i++)
                step(kernel, set);
            check(cu_stream_synchronize(stream), "cuStreamSynchronize");
            printf("{\"ns\": %llu}\n", (unsigned long long)(now_ns() - begin));
        } else {
            printf("{\"error\": \"nothing is known of %s\"}\n", name);
        }
        fflush(stdout);
    }
    return 0;
}
