/* How processes and threads begin and end, and what interrupts them, while the GPU is shared. */
#include "cuda_program.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

static char *self;

/* ---- The end of a process, with work pending ---- */

static void leave_work(void)
{
    begin();
    CUdeviceptr memory = filled(4 * MIB, 1);
    for (int i = 0; i < 4; i++) {
        OK(launch(NULL, 20000000));
        OK(cuMemsetD32Async(memory, 2, MIB, NULL));
    }
}

static void exit_pending(void)
{
    leave_work();
    printf("good\n");
    exit(complaints != 0);
}

static void quick_exit_pending(void)
{
    leave_work();
    printf("good\n");
    fflush(stdout);
    _exit(complaints != 0);
}

static void return_pending(void)
{
    leave_work();
}

static void exec_pending(void)
{
    leave_work();
    fflush(stdout);
    execl(self, self, "fresh", (char *)NULL);
    CHECK(false, "exec failed");
}

static void fresh(void)
{
    begin();
    CUdeviceptr memory = filled(MIB, 3);
    let_others();
    CHECK(holds(memory, MIB, 3), "memory has changed");
    OK(cuMemFree(memory));
}

/* ---- fork ---- */

static int wait_for(pid_t child)
{
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child, "the child is lost");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static pid_t child_that(void (*runs)(void))
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        complaints = 0;
        runs();
        fflush(stdout);
        _exit(complaints != 0);
    }
    return child;
}

static void fork_before(void)
{
    pid_t child = child_that(fresh);
    fresh();
    CHECK(wait_for(child) == 0, "a child that was forked before CUDA could not use it");
}

/* As the driver has it: CUDA is not usable in a child that was forked after cuInit, and says so. */
static void without_cuda(void)
{
    CUdeviceptr memory;
    CUcontext context;
    CHECK(cuMemAlloc(&memory, MIB) == CUDA_ERROR_NOT_INITIALIZED, "a child has memory of its parent's driver");
    CHECK(launch(NULL, 1000) == CUDA_ERROR_NOT_INITIALIZED, "a child can launch with its parent's driver");
    CHECK(cuCtxGetCurrent(&context) == CUDA_ERROR_NOT_INITIALIZED, "a child has its parent's context");
}

static void fork_after(void)
{
    begin();
    CUdeviceptr memory = filled(4 * MIB, 8);
    OK(launch(NULL, 3000000));
    pid_t child = child_that(without_cuda);
    let_others();
    CHECK(wait_for(child) == 0, "a child that was forked after CUDA saw something else than the driver's error");
    CHECK(holds(memory, 4 * MIB, 8), "memory has changed behind a fork");
    fflush(stdout);
    child = fork();
    if (child == 0) {
        execl(self, self, "fresh", (char *)NULL);
        _exit(9);
    }
    let_others();
    CHECK(wait_for(child) == 0, "a child that became another program could not use CUDA");
    CHECK(holds(memory, 4 * MIB, 8), "memory has changed behind a second fork");
}

/* ---- dlclose ---- */

static void close_driver(void)
{
    int (*init)(unsigned);
    void *found[2];
    for (int i = 0; i < 2; i++) {
        void *handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        CHECK(handle != NULL, "%s", dlerror());
        *(void **)&init = dlsym(handle, "cuInit");
        CHECK(init != NULL && init(0) == 0, "cuInit failed");
        found[i] = dlsym(handle, "cuLaunchKernel");
        CHECK(dlclose(handle) == 0, "%s", dlerror());
    }
    CHECK(found[0] == found[1], "the second dlopen gave another wrapper");
    fresh();
}

/* ---- Signals ---- */

static volatile sig_atomic_t handled;
static CUresult handler_result;
static uint64_t handler_gated;
static sigjmp_buf target;
static volatile bool jump;

static void on_alarm(int number)
{
    (void)number;
    handled++;
    if (jump)
        siglongjmp(target, 1);
    uint64_t calls = gated();
    handler_result = launch(NULL, 1000000);
    handler_gated = gated() - calls;
}

static void set_alarm(void)
{
    struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    sigemptyset(&action.sa_mask);
    sigaction(SIGALRM, &action, NULL);
    begin();
}

/* This thread is asleep before the gate, because somebody else has the lease. */
static bool waits_before_the_gate(void)
{
    return of_hook().waiting_threads != 0;
}

static pthread_t sleeper;
static volatile bool over;

static void *interrupt_waits(void *sent)
{
    while (!over)
        if (waits_before_the_gate()) {
            ++*(volatile unsigned *)sent;
            pthread_kill(sleeper, SIGALRM);
            nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL); /* so that it can go on */
        } else {
            nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
        }
    return NULL;
}

/* Calls CUDA until its waits have been interrupted so often; each must be whole again after it. */
static void be_interrupted(unsigned often)
{
    pthread_t other;
    unsigned sent = 0;
    sleeper = pthread_self();
    CHECK(pthread_create(&other, NULL, interrupt_waits, &sent) == 0, "no thread");
    while ((unsigned)handled < often) {
        if (sigsetjmp(target, 1) == 0) {
            OK(launch(NULL, 500000));
            OK(cuMemsetD32(filled(4096, 5), 6, 1024));
        }
        CHECK(handler_result == CUDA_SUCCESS, "a launch in a handler says %d", (int)handler_result);
    }
    over = true;
    pthread_join(other, NULL);
}

static void handler_launches(void)
{
    set_alarm();
    CUdeviceptr memory = filled(MIB, 4);
    be_interrupted(10);
    CHECK(handler_gated == 1, "a launch in a handler passed the gate %d times", (int)handler_gated);
    CHECK(holds(memory, MIB, 4), "memory has changed behind a handler");
}

static void handler_jumps(void)
{
    set_alarm();
    CUdeviceptr memory = filled(MIB, 4);
    jump = true;
    be_interrupted(10);
    jump = false;
    for (int i = 0; i < 20; i++) { /* it still stops before the gate: else its work would lie beside that of others */
        OK(launch(NULL, 2000000));
        OK(cuCtxSynchronize());
    }
    CHECK(holds(memory, MIB, 4), "memory has changed behind a jump");
    CHECK(!waits_before_the_gate(), "a thread that jumped out of its wait still counts as waiting");
}

/* ---- Threads ---- */

static void *work_then_end(void *argument)
{
    OK(cuCtxSetCurrent(primary));
    OK(launch(NULL, 1000000));
    pthread_exit(argument);
}

/* Not inside of a call: the simulated driver waits in pthread_cond_wait, and would be left with its lock taken. */
static void *work_until_cancelled(void *argument)
{
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    OK(cuCtxSetCurrent(primary));
    for (;;) {
        OK(launch(NULL, 300000));
        pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
        *(volatile bool *)argument = true;
        pthread_testcancel();
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
    }
    return NULL;
}

static void cancel(void *(*runs)(void *))
{
    pthread_t thread;
    volatile bool works = false;
    void *result;
    CHECK(pthread_create(&thread, NULL, runs, (void *)&works) == 0, "no thread");
    while (!works)
        sched_yield();
    CHECK(pthread_cancel(thread) == 0 && pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED, "it was not cancelled");
}

static void threads_end(void)
{
    begin();
    CUdeviceptr memory = filled(MIB, 4);
    for (int i = 0; i < 40; i++) { /* more than there are slots without allocation */
        pthread_t thread;
        CHECK(pthread_create(&thread, NULL, work_then_end, NULL) == 0 && pthread_join(thread, NULL) == 0, "no thread");
    }
    for (int i = 0; i < 5; i++)
        cancel(work_until_cancelled);
    let_others();
    CHECK(holds(memory, MIB, 4), "memory has changed");
}

int main(int count, char **arguments)
{
    static const named_case cases[] = {
        {"exit_pending", exit_pending},         {"quick_exit_pending", quick_exit_pending}, {"return_pending", return_pending},
        {"exec_pending", exec_pending},         {"fresh", fresh},                           {"fork_before", fork_before},
        {"fork_after", fork_after},             {"close_driver", close_driver},             {"handler_launches", handler_launches},
        {"handler_jumps", handler_jumps},       {"threads_end", threads_end},               {NULL, NULL},
    };
    self = arguments[0];
    return run_case(cases, count, arguments);
}
