/* Gates for functions whose signature this build does not know: from a newer CUDA, or a graphics header.
 *
 * A thunk saves all argument registers, enters the gate of the current context's GPU, calls the function with a copy of the caller's stack arguments
 * (16 words: 22 arguments in all), and leaves the gate.  The number of thunks is fixed; each is assigned once, without locks.
 */
#include "hooks/hooks.h"

#include "base/log.h"
#include "contexts/gpu.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"

#define THUNK_COUNT 64

static struct {
    _Atomic(void *) target; /* set once */
} thunks[THUNK_COUNT];

typedef struct thunk_frame { /* in the stack frame of the assembly: 16 bytes */
    nvs_slot *slot;
    uint32_t gpu;
} thunk_frame;
_Static_assert(sizeof(thunk_frame) == 16, "the assembly reserves 16 bytes");

__attribute__((visibility("hidden"), used)) void *nvs_thunk_enter(uint32_t index, thunk_frame *frame)
{
    frame->gpu = nvs_current_gpu();
    frame->slot = nvs_gate_enter(frame->gpu);
    /* Pairs with the release store in nvs_thunk_make. */
    return atomic_load_explicit(&thunks[index].target, memory_order_acquire);
}

__attribute__((visibility("hidden"), used)) void nvs_thunk_leave(thunk_frame *frame)
{
    nvs_gate_leave(frame->slot, frame->gpu); /* not paced: the stream is unknown */
}

extern const char nvs_thunk_stubs[] __attribute__((visibility("hidden")));

void *nvs_thunk_make(const char *name, void *target)
{
    for (unsigned index = 0; index < THUNK_COUNT; index++) {
        void *seen = NULL;
        /* Pairs with the acquire load in nvs_thunk_enter. */
        const bool taken = atomic_compare_exchange_strong_explicit(&thunks[index].target, &seen, target, memory_order_release,
                                                                   memory_order_acquire);
        if (taken)
            nvs_log(NVS_LOG_INFO, "%s: this build does not know its parameters, so a thunk gates it without pacing", name);
        if (taken || seen == target)
            return (void *)(uintptr_t)(nvs_thunk_stubs + 16 * (size_t)index);
    }
    NVS_LOG_ONCE(NVS_LOG_WARNING, "%s is not gated: all thunks are in use", name);
    return target;
}

#define IN_TEXT(number) #number
#define TEXT(number) IN_TEXT(number)

/* One stub for each thunk, 16 bytes long, which enters nvs_thunk_common with its number; and the beginning of that. */
#define STUBS(enter)                                \
    ".text\n"                                       \
    ".balign 16\n"                                  \
    ".type nvs_thunk_stubs,@function\n"             \
    ".hidden nvs_thunk_stubs\n"                     \
    ".globl nvs_thunk_stubs\n"                      \
    "nvs_thunk_stubs:\n"                            \
    ".set nvs_index, 0\n"                           \
    ".rept " TEXT(THUNK_COUNT) "\n"                 \
    "  .balign 16\n"                                \
    "  " enter "\n"                                 \
    "  .set nvs_index, nvs_index + 1\n"             \
    ".endr\n"                                       \
    ".size nvs_thunk_stubs, .-nvs_thunk_stubs\n"    \
    ".balign 16\n"                                  \
    ".type nvs_thunk_common,@function\n"            \
    "nvs_thunk_common:\n"                           \
    "  .cfi_startproc\n"

#if defined(__x86_64__)
/* Frame, from %rbp down: index 8, thunk_frame 16 at -32, eight registers at -96, xmm0-7 at -224, stack arguments at -352. */
__asm__(STUBS("movl $nvs_index, %r11d; jmp nvs_thunk_common")
        "  pushq %rbp\n"
        "  .cfi_def_cfa_offset 16\n"
        "  .cfi_offset %rbp, -16\n"
        "  movq %rsp, %rbp\n"
        "  .cfi_def_cfa_register %rbp\n"
        "  subq $352, %rsp\n"
        "  movq %rdi, -96(%rbp)\n"
        "  movq %rsi, -88(%rbp)\n"
        "  movq %rdx, -80(%rbp)\n"
        "  movq %rcx, -72(%rbp)\n"
        "  movq %r8, -64(%rbp)\n"
        "  movq %r9, -56(%rbp)\n"
        "  movq %rax, -48(%rbp)\n"
        "  movq %r10, -40(%rbp)\n"
        "  movups %xmm0, -224(%rbp)\n"
        "  movups %xmm1, -208(%rbp)\n"
        "  movups %xmm2, -192(%rbp)\n"
        "  movups %xmm3, -176(%rbp)\n"
        "  movups %xmm4, -160(%rbp)\n"
        "  movups %xmm5, -144(%rbp)\n"
        "  movups %xmm6, -128(%rbp)\n"
        "  movups %xmm7, -112(%rbp)\n"
        "  movl %r11d, %edi\n"
        "  leaq -32(%rbp), %rsi\n"
        "  call nvs_thunk_enter\n"
        "  movq %rax, %r11\n"
        "  cld\n"
        "  leaq 16(%rbp), %rsi\n"
        "  movq %rsp, %rdi\n"
        "  movl $16, %ecx\n"
        "  rep movsq\n"
        "  movq -96(%rbp), %rdi\n"
        "  movq -88(%rbp), %rsi\n"
        "  movq -80(%rbp), %rdx\n"
        "  movq -72(%rbp), %rcx\n"
        "  movq -64(%rbp), %r8\n"
        "  movq -56(%rbp), %r9\n"
        "  movq -48(%rbp), %rax\n"
        "  movq -40(%rbp), %r10\n"
        "  movups -224(%rbp), %xmm0\n"
        "  movups -208(%rbp), %xmm1\n"
        "  movups -192(%rbp), %xmm2\n"
        "  movups -176(%rbp), %xmm3\n"
        "  movups -160(%rbp), %xmm4\n"
        "  movups -144(%rbp), %xmm5\n"
        "  movups -128(%rbp), %xmm6\n"
        "  movups -112(%rbp), %xmm7\n"
        "  call *%r11\n"
        "  movq %rax, -96(%rbp)\n"
        "  movq %rdx, -88(%rbp)\n"
        "  movups %xmm0, -224(%rbp)\n"
        "  leaq -32(%rbp), %rdi\n"
        "  call nvs_thunk_leave\n"
        "  movq -96(%rbp), %rax\n"
        "  movq -88(%rbp), %rdx\n"
        "  movups -224(%rbp), %xmm0\n"
        "  leave\n"
        "  .cfi_def_cfa %rsp, 8\n"
        "  ret\n"
        "  .cfi_endproc\n"
        ".size nvs_thunk_common, .-nvs_thunk_common\n");
#elif defined(__aarch64__)
/* Frame, from x29 up: link 16, thunk_frame 16 at 16, x0-x8 at 32, q0-q7 at 112; below it 128 bytes of stack arguments. */
__asm__(STUBS("mov w16, #nvs_index; b nvs_thunk_common")
        "  stp x29, x30, [sp, #-240]!\n"
        "  .cfi_def_cfa_offset 240\n"
        "  .cfi_offset 29, -240\n"
        "  .cfi_offset 30, -232\n"
        "  mov x29, sp\n"
        "  .cfi_def_cfa_register 29\n"
        "  sub sp, sp, #128\n"
        "  stp x0, x1, [x29, #32]\n"
        "  stp x2, x3, [x29, #48]\n"
        "  stp x4, x5, [x29, #64]\n"
        "  stp x6, x7, [x29, #80]\n"
        "  str x8, [x29, #96]\n"
        "  stp q0, q1, [x29, #112]\n"
        "  stp q2, q3, [x29, #144]\n"
        "  stp q4, q5, [x29, #176]\n"
        "  stp q6, q7, [x29, #208]\n"
        "  mov w0, w16\n"
        "  add x1, x29, #16\n"
        "  bl nvs_thunk_enter\n"
        "  mov x16, x0\n"
        "  add x9, x29, #240\n"
        "  mov x10, sp\n"
        "  mov w11, #8\n"
        "1: ldp x12, x13, [x9], #16\n"
        "  stp x12, x13, [x10], #16\n"
        "  subs w11, w11, #1\n"
        "  b.ne 1b\n"
        "  ldp x0, x1, [x29, #32]\n"
        "  ldp x2, x3, [x29, #48]\n"
        "  ldp x4, x5, [x29, #64]\n"
        "  ldp x6, x7, [x29, #80]\n"
        "  ldr x8, [x29, #96]\n"
        "  ldp q0, q1, [x29, #112]\n"
        "  ldp q2, q3, [x29, #144]\n"
        "  ldp q4, q5, [x29, #176]\n"
        "  ldp q6, q7, [x29, #208]\n"
        "  blr x16\n"
        "  stp x0, x1, [x29, #32]\n"
        "  str q0, [x29, #112]\n"
        "  add x0, x29, #16\n"
        "  bl nvs_thunk_leave\n"
        "  ldp x0, x1, [x29, #32]\n"
        "  ldr q0, [x29, #112]\n"
        "  mov sp, x29\n"
        "  ldp x29, x30, [sp], #240\n"
        "  .cfi_def_cfa 31, 0\n"
        "  .cfi_restore 29\n"
        "  .cfi_restore 30\n"
        "  ret\n"
        "  .cfi_endproc\n"
        ".size nvs_thunk_common, .-nvs_thunk_common\n");
#endif
