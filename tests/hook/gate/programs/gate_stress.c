/* Threads that pass the gate against one that closes and opens it; for TSan, which sees the plain variables.
 *
 *   gate_stress [fence | late]      in a sandbox that refuses membarrier: from the start, or once the gates are open
 *
 * Checked: nobody is inside while the gate is closed; what a thread wrote inside is seen by the closer, and what the closer wrote while
 * it was closed is seen inside, also behind a linked gate, which closes with it; a thread that dies inside does not block the closer; calls are counted;
 * nobody waits for ever.
 */
#include "base/base.h"
#include "base/process.h"
#include "gate/gate.h"

#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

enum { THREADS = 6, ROUNDS = 400, DYING = 40 };

static _Atomic int inside;
static _Atomic bool stop;
static uint64_t written[THREADS]; /* by its thread, inside; read while closed */
static uint64_t epoch;            /* by the closer, while closed; read inside */
static _Atomic uint64_t passed;

static void wait_for_lease(uint32_t gpu)
{
    (void)nvs_gate_wait_begin(gpu);
    while (!nvs_gate_wait(gpu, UINT64_MAX)) {
    }
    nvs_gate_wait_end(gpu);
}

const nvs_port nvs_coordinator = {.wait_for_lease = wait_for_lease};

static void fail(const char *what)
{
    fprintf(stderr, "%s\n", what);
    _Exit(1);
}

static void *pass(void *argument)
{
    size_t me = (size_t)(uintptr_t)argument;
    const uint32_t gpu = me % 2 != 0 ? 2 : 1;
    uint64_t seen = 0;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        nvs_slot *slot = nvs_gate_enter(gpu);
        atomic_fetch_add_explicit(&inside, 1, memory_order_relaxed);
        nvs_slot *nested = nvs_gate_enter(1); /* must not wait */
        if (epoch < seen)
            fail("an older epoch was seen");
        seen = epoch;
        written[me]++;
        (void)nvs_gate_leave(nested, 1);
        atomic_fetch_sub_explicit(&inside, 1, memory_order_relaxed);
        (void)nvs_gate_leave(slot, gpu);
        atomic_fetch_add_explicit(&passed, 1, memory_order_relaxed);
    }
    return NULL;
}

/* As in a sandbox that does not know it. */
static void refuse_membarrier(void)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof code / sizeof *code, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        fail("no seccomp here");
}

static bool has_fences(void)
{
    return (atomic_load_explicit(&nvs_hot.gates[1], memory_order_relaxed) & NVS_GATE_FENCED) != 0;
}

static void *die_inside(void *argument)
{
    (void)nvs_gate_enter((uintptr_t)argument % 2 != 0 ? 2 : 1);
    pthread_exit(argument);
}

int main(int argc, char **argv)
{
    pthread_t threads[THREADS], dying;
    uint64_t sum = 0;
    nvs_gate_init();
    if (argc > 1 && strcmp(argv[1], "fence") == 0)
        refuse_membarrier();
    nvs_gate_arm();
    if (argc > 1 && strcmp(argv[1], "fence") == 0 && !has_fences())
        fail("no fences where there is no membarrier");
    atomic_store_explicit(&nvs_gate_links, 1u << 1 | 1u << 2, memory_order_release); /* no other thread runs yet */
    nvs_gate_open(1, false);
    nvs_gate_open(2, false);
    if (argc > 1 && strcmp(argv[1], "late") == 0) /* for this thread, which closes */
        refuse_membarrier();
    for (size_t i = 0; i < THREADS; i++)
        if (pthread_create(&threads[i], NULL, pass, (void *)(uintptr_t)i) != 0)
            fail("no thread");
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t before = atomic_load_explicit(&passed, memory_order_relaxed);
        if (round < DYING && pthread_create(&dying, NULL, die_inside, (void *)(uintptr_t)round) != 0)
            fail("no thread");
        if (nvs_gate_close(1, nvs_now_ns() + 20000000000u) != NVS_OK)
            fail("somebody stayed inside");
        sum = 0;
        for (int look = 0; look < 50; look++)
            if (atomic_load_explicit(&inside, memory_order_relaxed) != 0)
                fail("somebody is inside a closed gate");
        for (size_t i = 0; i < THREADS; i++)
            sum += written[i];
        epoch++;
        nvs_gate_open(1, round % 2 != 0);
        nvs_gate_open(2, round % 2 != 0);
        if (argc > 1 && !has_fences())
            fail("membarrier was refused, and the gate has no fences");
        if (round < DYING)
            pthread_join(dying, NULL);
        while (atomic_load_explicit(&passed, memory_order_relaxed) == before) { /* bounded by the test's time-out */
        }
    }
    atomic_store_explicit(&stop, true, memory_order_relaxed);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    uint64_t of[3] = {0};
    for (size_t i = 0; i < THREADS; i++)
        of[i % 2 != 0 ? 2 : 1] += written[i];
    if (nvs_gate_calls(1) != of[1] || nvs_gate_calls(2) != of[2] || of[1] == 0 || of[2] == 0)
        fail("calls were miscounted");
    if (nvs_gate_inside(1) || nvs_gate_inside(2) || nvs_gate_waiting(1) != 0)
        fail("somebody is left");
    puts("good");
    return 0;
}
