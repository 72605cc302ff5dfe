/* Look-ups by the application: dlsym, dlvsym, cuGetProcAddress.
 *
 * Covered: the PLT (the hook's exported symbols come first), dlsym and dlvsym, cuGetProcAddress in both ABIs, and libraries that are opened
 * with RTLD_DEEPBIND (deepbind.c), except for calls of their constructors.
 * Not covered: a second libcuda in the process, by dlopen of another file or by dlmopen, which needs no preload.  The first look-up in one logs a
 * warning; look-ups inside of a new namespace are not seen, since it has its own libc.
 *
 * The real resolver comes first and its answer is translated, so that a missing function stays missing.  Names that are
 * neither the driver's ("cu" and a capital letter) nor NVML's ("nvm") go to libc by a tail call: it sees the caller's return address, and
 * RTLD_NEXT and RTLD_DEFAULT keep their meaning.  The hook takes no lock and allocates nothing here: this runs before cuInit, in
 * constructors, and in many copies of cudart at once.
 */
#define _GNU_SOURCE /* RTLD_NEXT, RTLD_DEFAULT */

#include "base/config.h"
#include "base/log.h"
#include "driver/cuda_api.h"
#include "driver/library.h"
#include "driver/nvml.h"

#include <dlfcn.h>
#include <string.h>

typedef struct nvs_answer { /* two registers */
    void *address;
    uintptr_t decided; /* 0: libc must answer, with the caller's return address */
} nvs_answer;

/* The application's look-up found a wrapper of the hook, or would find one. */
static nvs_answer answer_by_driver(nvs_id id, const char *name)
{
    void *address = nvs_driver_symbol(name);
    if (address != NULL)
        return (nvs_answer){nvs_translate_symbol(id, name, address), 1};
    /* Missing: leaves libc's message in dlerror() for the application. */
    return (nvs_answer){nvs_libc_dlsym()(RTLD_NEXT, name), 1};
}

static nvs_answer answer_nvml(void *handle, const char *name, const char *version)
{
    const nvs_nvml_id id = nvs_nvml_id_of_name(name);
    nvs_dlsym_function *real = nvs_libc_dlsym();
    nvs_dlvsym_function *real_versioned = nvs_libc_dlvsym();
    if (id == NVS_NVML_COUNT || real == NULL || real_versioned == NULL)
        return (nvs_answer){NULL, 0};
    /* A search of the whole process starts after the hook, and finds NVML's own function. */
    if (handle == RTLD_DEFAULT)
        handle = RTLD_NEXT;
    void *address = version != NULL ? real_versioned(handle, name, version) : real(handle, name);
    if (address == nvs_nvml_wrapper(id)) /* dlopen(NULL) and the like */
        address = real(RTLD_NEXT, name);
    if (address != NULL && address == nvs_nvml_real(id))
        address = nvs_nvml_wrapper(id);
    return (nvs_answer){address, 1};
}

static nvs_answer answer(void *handle, const char *name, const char *version, const void *caller)
{
    const nvs_answer undecided = {NULL, 0};
    if (name[0] == 'n')
        return answer_nvml(handle, name, version);
    const nvs_id id = nvs_id_of_name(name);
    if (id == NVS_ID_COUNT ? !nvs_name_submits(name) : !nvs_is_gated(&nvs_entries[id]))
        return undecided;
    nvs_dlsym_function *real = nvs_libc_dlsym();
    nvs_dlvsym_function *real_versioned = nvs_libc_dlvsym();
    if (real == NULL || real_versioned == NULL)
        return undecided;

    const bool wrapped = id != NVS_ID_COUNT && nvs_entries[id].wrapper != NULL;
    void *address = NULL; /* RTLD_NEXT: of a library before the hook, so it would find the hook's own symbol, or the driver's */
    if (handle != RTLD_NEXT)
        address = version != NULL ? real_versioned(handle, name, version) : real(handle, name);
    if (address == NULL && (handle == RTLD_DEFAULT || handle == RTLD_NEXT)) {
        if (wrapped || nvs_driver_loaded())
            return answer_by_driver(id, name);
        return undecided;
    }
    if (address == NULL)
        return (nvs_answer){NULL, 1};
    if (wrapped && address == nvs_as_address(nvs_entries[id].wrapper))
        return answer_by_driver(id, name); /* dlopen(NULL) and the like */
    if (id != NVS_ID_COUNT && address == nvs_as_address(nvs_real(id)))
        return (nvs_answer){nvs_translate_symbol(id, name, address), 1};
    if (id == NVS_ID_COUNT && nvs_driver_loaded() && address == nvs_driver_symbol(name))
        return (nvs_answer){nvs_translate_symbol(id, name, address), 1};
    const char *copy = wrapped && nvs_config.enabled ? nvs_driver_file(address) : NULL;
    if (copy != NULL && nvs_driver_file(caller) == NULL) /* WSL's driver is two such files */
        NVS_LOG_ONCE(NVS_LOG_WARNING, "%s is a second copy of the CUDA driver in this program: calls into it take no turns and have no memory limit; load "
                     "libcuda.so.1 by that name, once", copy);
    return (nvs_answer){address, 1}; /* another library's function of that name */
}

/* Called by the assembly below with the application's arguments, for "cu" and a capital letter and for "nvm" only. */
__attribute__((visibility("hidden"), used)) nvs_answer nvs_answer_dlsym(void *handle, const char *name, const char *ignored, const void *caller)
{
    (void)ignored;
    return answer(handle, name, NULL, caller);
}

__attribute__((visibility("hidden"), used)) nvs_answer nvs_answer_dlvsym(void *handle, const char *name, const char *version, const void *caller)
{
    return answer(handle, name, version, caller);
}

NVS_EXPORT CUresult CUDAAPI cuGetProcAddress(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags)
{
    const CUresult result = NVS_REAL(cuGetProcAddress)(symbol, pfn, cudaVersion, flags);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL)
        *pfn = nvs_translate(symbol, *pfn, cudaVersion, flags);
    return result;
}

NVS_EXPORT CUresult CUDAAPI cuGetProcAddress_v2(const char *symbol, void **pfn, int cudaVersion, cuuint64_t flags,
                                                CUdriverProcAddressQueryResult *symbolStatus)
{
    const CUresult result = NVS_REAL(cuGetProcAddress_v2)(symbol, pfn, cudaVersion, flags, symbolStatus);
    if (result == CUDA_SUCCESS && symbol != NULL && pfn != NULL && *pfn != NULL)
        *pfn = nvs_translate(symbol, *pfn, cudaVersion, flags);
    return result;
}

/* dlsym and dlvsym.  If libc's own cannot be found, the answer is NULL. */
#if defined(__x86_64__)
#define NVS_DLSYM(function)                                                                                \
    __asm__(".text\n"                                                                                      \
            ".balign 16\n"                                                                                 \
            ".globl " #function "\n"                                                                       \
            ".type " #function ",@function\n" #function ":\n"                                              \
            ".cfi_startproc\n"                                                                             \
            "  testq %rsi, %rsi\n"                                                                         \
            "  jz 1f\n"                                                                                    \
            "  cmpb $'c', (%rsi)\n"                                                                        \
            "  je 4f\n"                                                                                    \
            "  cmpb $'n', (%rsi)\n"                                                                        \
            "  jne 1f\n"                                                                                   \
            "  cmpb $'v', 1(%rsi)\n"                                                                       \
            "  jne 1f\n"                                                                                   \
            "  cmpb $'m', 2(%rsi)\n"                                                                       \
            "  jne 1f\n"                                                                                   \
            "  jmp 5f\n"                                                                                   \
            "4: cmpb $'u', 1(%rsi)\n"                                                                       \
            "  jne 1f\n"                                                                                   \
            "  movzbl 2(%rsi), %eax\n"                                                                     \
            "  subl $'A', %eax\n"                                                                          \
            "  cmpl $25, %eax\n"                                                                           \
            "  ja 1f\n"                                                                                    \
            "5: subq $24, %rsp\n"                                                                           \
            "  .cfi_adjust_cfa_offset 24\n"                                                                \
            "  movq %rdi, (%rsp)\n"                                                                        \
            "  movq %rsi, 8(%rsp)\n"                                                                       \
            "  movq %rdx, 16(%rsp)\n"                                                                      \
            "  movq 24(%rsp), %rcx\n"                                                                      \
            "  call nvs_answer_" #function "\n"                                                            \
            "  movq %rdx, %rcx\n"                                                                          \
            "  movq (%rsp), %rdi\n"                                                                        \
            "  movq 8(%rsp), %rsi\n"                                                                       \
            "  movq 16(%rsp), %rdx\n"                                                                      \
            "  addq $24, %rsp\n"                                                                           \
            "  .cfi_adjust_cfa_offset -24\n"                                                               \
            "  testq %rcx, %rcx\n"                                                                         \
            "  jnz 2f\n"                                                                                   \
            "1: movq nvs_real_" #function "(%rip), %rax\n"                                                 \
            "  testq %rax, %rax\n"                                                                         \
            "  jz 3f\n"                                                                                    \
            "  jmp *%rax\n"                                                                                \
            "2: ret\n"                                                                                     \
            "3: subq $24, %rsp\n"                                                                          \
            "  .cfi_adjust_cfa_offset 24\n"                                                                \
            "  movq %rdi, (%rsp)\n"                                                                        \
            "  movq %rsi, 8(%rsp)\n"                                                                       \
            "  movq %rdx, 16(%rsp)\n"                                                                      \
            "  call nvs_libc_" #function "\n"                                                              \
            "  movq (%rsp), %rdi\n"                                                                        \
            "  movq 8(%rsp), %rsi\n"                                                                       \
            "  movq 16(%rsp), %rdx\n"                                                                      \
            "  addq $24, %rsp\n"                                                                           \
            "  .cfi_adjust_cfa_offset -24\n"                                                               \
            "  testq %rax, %rax\n"                                                                         \
            "  jz 2b\n"                                                                                    \
            "  jmp *%rax\n"                                                                                \
            ".cfi_endproc\n"                                                                               \
            ".size " #function ", .-" #function "\n");
#elif defined(__aarch64__)
#define NVS_DLSYM(function)                                                                                \
    __asm__(".text\n"                                                                                      \
            ".balign 16\n"                                                                                 \
            ".globl " #function "\n"                                                                       \
            ".type " #function ",@function\n" #function ":\n"                                              \
            ".cfi_startproc\n"                                                                             \
            "  cbz x1, 1f\n"                                                                               \
            "  ldrb w9, [x1]\n"                                                                            \
            "  cmp w9, #'c'\n"                                                                             \
            "  b.eq 5f\n"                                                                                  \
            "  cmp w9, #'n'\n"                                                                             \
            "  b.ne 1f\n"                                                                                  \
            "  ldrb w9, [x1, #1]\n"                                                                        \
            "  cmp w9, #'v'\n"                                                                             \
            "  b.ne 1f\n"                                                                                  \
            "  ldrb w9, [x1, #2]\n"                                                                        \
            "  cmp w9, #'m'\n"                                                                             \
            "  b.ne 1f\n"                                                                                  \
            "  b 6f\n"                                                                                     \
            "5: ldrb w9, [x1, #1]\n"                                                                        \
            "  cmp w9, #'u'\n"                                                                             \
            "  b.ne 1f\n"                                                                                  \
            "  ldrb w9, [x1, #2]\n"                                                                        \
            "  sub w9, w9, #'A'\n"                                                                         \
            "  cmp w9, #25\n"                                                                              \
            "  b.hi 1f\n"                                                                                  \
            "6: stp x29, x30, [sp, #-48]!\n"                                                                \
            "  .cfi_def_cfa_offset 48\n"                                                                   \
            "  .cfi_offset 29, -48\n"                                                                      \
            "  .cfi_offset 30, -40\n"                                                                      \
            "  stp x0, x1, [sp, #16]\n"                                                                    \
            "  str x2, [sp, #32]\n"                                                                        \
            "  mov x3, x30\n"                                                                              \
            "  bl nvs_answer_" #function "\n"                                                              \
            "  cbnz x1, 2f\n"                                                                              \
            "  ldp x0, x1, [sp, #16]\n"                                                                    \
            "  ldr x2, [sp, #32]\n"                                                                        \
            "  ldp x29, x30, [sp], #48\n"                                                                  \
            "  .cfi_remember_state\n"                                                                      \
            "  .cfi_restore 29\n"                                                                          \
            "  .cfi_restore 30\n"                                                                          \
            "  .cfi_def_cfa_offset 0\n"                                                                    \
            "1: adrp x9, nvs_real_" #function "\n"                                                         \
            "  ldr x9, [x9, #:lo12:nvs_real_" #function "]\n"                                              \
            "  cbz x9, 3f\n"                                                                               \
            "  br x9\n"                                                                                    \
            "  .cfi_restore_state\n"                                                                       \
            "2: ldp x29, x30, [sp], #48\n"                                                                 \
            "  .cfi_restore 29\n"                                                                          \
            "  .cfi_restore 30\n"                                                                          \
            "  .cfi_def_cfa_offset 0\n"                                                                    \
            "  ret\n"                                                                                      \
            "3: stp x29, x30, [sp, #-48]!\n"                                                               \
            "  .cfi_def_cfa_offset 48\n"                                                                   \
            "  .cfi_offset 29, -48\n"                                                                      \
            "  .cfi_offset 30, -40\n"                                                                      \
            "  stp x0, x1, [sp, #16]\n"                                                                    \
            "  str x2, [sp, #32]\n"                                                                        \
            "  bl nvs_libc_" #function "\n"                                                                \
            "  mov x9, x0\n"                                                                               \
            "  ldp x0, x1, [sp, #16]\n"                                                                    \
            "  ldr x2, [sp, #32]\n"                                                                        \
            "  ldp x29, x30, [sp], #48\n"                                                                  \
            "  .cfi_restore 29\n"                                                                          \
            "  .cfi_restore 30\n"                                                                          \
            "  .cfi_def_cfa_offset 0\n"                                                                    \
            "  cbz x9, 4f\n"                                                                               \
            "  br x9\n"                                                                                    \
            "4: mov x0, #0\n"                                                                              \
            "  ret\n"                                                                                      \
            ".cfi_endproc\n"                                                                               \
            ".size " #function ", .-" #function "\n");
#else
#error "The hook knows the calling conventions of x86-64 and aarch64 only"
#endif

NVS_DLSYM(dlsym)
NVS_DLSYM(dlvsym)
