/* A CUDA program that does what its standard input says, one command a line, and answers each with one line.
 *
 *   gpu N              from now on GPU N: "gpu"
 *   launch NS          one kernel of so many nanoseconds on the default stream: "launched"
 *   background NS      the same by a thread of its own: "begun" at once, "background launched" when it is through
 *   count N NS         so many kernels, one after the other: "counted"
 *   block              a kernel on the default stream that ends at `unblock`: "blocked"
 *   block-apart        the same on the per-thread default stream of a thread of its own: "blocked"
 *   host KIND          the same, a host function on a stream of its own, behind it a kernel: "blocked".  KIND: 0 a function, 1 a callback,
 *                      2 captured, 3 a node of a graph
 *   behind             a kernel on another stream, behind the kernel of the last `host`: "launched"
 *   copy-behind        a host function on the default stream that ends at `unblock`, and by a thread of its own a copy that waits for it: "begun"
 *                      at once, "copied" at its end
 *   driven             "driven 0" before the host function runs, "driven 1" while it runs, then "driven " and the driver's answer to its call
 *   unblock            "unblocked"
 *   storm T N          T threads, N kernels of 20 us each: "stormed" when all are through
 *   sync               wait for the device: "synchronised"
 *   alloc BYTES        "allocated" or "refused RESULT"
 *   captured N NS      N kernels into a capture, then its graph is launched: "captured RESULT"
 *   fork               a child that uses CUDA as a fresh process would: "child STATUS"
 *   idle-child         a child that waits until its input ends: "child PID"
 *   state              "state LEASE LEASE_ID WAITERS WAITING_THREADS CALLS", from the hook's own interface
 *   yield              "yielded"
 *   step               nvshare_step: "stepped"
 *   threads            number of threads of the process: "threads N"
 *   exec               becomes another program, which waits until its input ends
 *   open               opens the library that PLUGIN names: "opened"
 *   late               from now on a destructor of the program uses CUDA: "late", and at the end "late RESULT..."
 *   exit               exit(0), whatever the threads do
 */
#include "cuda_program.h"

#include <dirent.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <sys/wait.h>

static CUstream hosted;
static _Atomic int driven;
static sem_t unblocked;

static void say(const char *format, ...)
{
    __builtin_va_list arguments;
    char line[256];
    __builtin_va_start(arguments, format);
    int size = vsnprintf(line, sizeof line - 1, format, arguments);
    __builtin_va_end(arguments);
    line[size++] = '\n';
    if (write(STDOUT_FILENO, line, (size_t)size) != size)
        _exit(3);
}

static void wait_for_unblock(void *argument)
{
    while (sem_wait(&unblocked) != 0) {
    }
}

static CUresult block(CUstream stream)
{
    return launch_call(call_host, stream, wait_for_unblock, NULL);
}

/* The simulated driver permits no call. */
static void wait_in_host_function(void *argument)
{
    CUdeviceptr memory;
    driven = 1;
    wait_for_unblock(argument);
    driven = (int)cuMemAlloc(&memory, 16);
}

static void wait_in_callback(CUstream stream, CUresult status, void *argument)
{
    if (stream == hosted && status == CUDA_SUCCESS)
        wait_in_host_function(argument);
}

static CUresult node(CUgraph *graph)
{
    CUgraphNode made;
    CUDA_HOST_NODE_PARAMS params = {.fn = wait_for_unblock, .userData = &unblocked};
    CUresult result = cuGraphCreate(graph, 0);
    if (result == CUDA_SUCCESS)
        result = cuGraphAddHostNode(&made, *graph, NULL, 0, &params);
    params.fn = wait_in_host_function;
    if (result == CUDA_SUCCESS)
        result = cuGraphHostNodeSetParams(made, &params);
    params = (CUDA_HOST_NODE_PARAMS){.fn = NULL};
    if (result == CUDA_SUCCESS)
        result = cuGraphHostNodeGetParams(made, &params);
    return result == CUDA_SUCCESS && (params.fn != wait_in_host_function || params.userData != &unblocked) ? CUDA_ERROR_UNKNOWN : result;
}

static CUresult host(unsigned kind)
{
    CUgraph graph;
    CUgraphExec executable;
    CUresult result = hosted == NULL ? cuStreamCreate(&hosted, CU_STREAM_NON_BLOCKING) : CUDA_SUCCESS;
    driven = 0;
    if (result != CUDA_SUCCESS)
        return result;
    if (kind == 2)
        result = cuStreamBeginCapture(hosted, CU_STREAM_CAPTURE_MODE_RELAXED);
    if (result == CUDA_SUCCESS && kind == 3)
        result = node(&graph);
    else if (result == CUDA_SUCCESS)
        result = kind == 1 ? cuStreamAddCallback(hosted, wait_in_callback, NULL, 0) : cuLaunchHostFunc(hosted, wait_in_host_function, NULL);
    if (result == CUDA_SUCCESS && kind == 2)
        result = cuStreamEndCapture(hosted, &graph);
    if (result == CUDA_SUCCESS && kind >= 2)
        result = cuGraphInstantiate(&executable, graph, 0);
    if (result == CUDA_SUCCESS && kind >= 2)
        result = cuGraphLaunch(executable, hosted);
    return result == CUDA_SUCCESS ? launch(hosted, 1000) : result;
}

static CUresult behind(void)
{
    CUstream stream;
    CUevent event;
    CUresult result = cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    if (result == CUDA_SUCCESS)
        result = cuEventRecord(event, hosted);
    if (result == CUDA_SUCCESS)
        result = cuStreamWaitEvent(stream, event, 0);
    return result == CUDA_SUCCESS ? launch(stream, 1000) : result;
}

static void *copy_behind(void *argument)
{
    CUdeviceptr memory;
    char byte = 0;
    driven = 0;
    cuCtxSetCurrent(primary);
    say(cuMemAlloc(&memory, 1) == CUDA_SUCCESS && cuLaunchHostFunc(NULL, wait_in_host_function, NULL) == CUDA_SUCCESS &&
                cuMemcpyDtoH(&byte, memory, 1) == CUDA_SUCCESS
            ? "copied" : "failed");
    return NULL;
}

static void *in_background(void *argument)
{
    uint64_t ns = (uint64_t)(uintptr_t)argument;
    cuCtxSetCurrent(primary);
    say("background %s", launch(NULL, ns) == CUDA_SUCCESS ? "launched" : "failed");
    return NULL;
}

static void *block_apart(void *argument)
{
    cuCtxSetCurrent(primary);
    say(block(CU_STREAM_PER_THREAD) == CUDA_SUCCESS ? "blocked" : "failed");
    for (;;)
        pause();
    return NULL;
}

static void *blow(void *argument)
{
    CUstream stream = NULL;
    uint64_t count = (uint64_t)(uintptr_t)argument;
    bool good = cuCtxSetCurrent(primary) == CUDA_SUCCESS && cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS;
    while (good && count-- > 0)
        good = launch(count % 3 == 0 ? NULL : stream, 20000) == CUDA_SUCCESS;
    good = good && cuStreamSynchronize(stream) == CUDA_SUCCESS && cuStreamDestroy(stream) == CUDA_SUCCESS;
    return good ? NULL : argument;
}

static bool storm(unsigned threads, uint64_t count)
{
    pthread_t all[16];
    void *bad = NULL, *one;
    if (threads > 16)
        return false;
    for (unsigned i = 0; i < threads; i++)
        if (pthread_create(&all[i], NULL, blow, (void *)(uintptr_t)count) != 0)
            return false;
    for (unsigned i = 0; i < threads; i++)
        if (pthread_join(all[i], &one) != 0 || one != NULL)
            bad = all;
    return bad == NULL;
}

static CUresult captured(unsigned count, uint64_t ns)
{
    CUstream stream;
    CUgraph graph;
    CUgraphExec executable;
    CUresult result = cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING);
    if (result == CUDA_SUCCESS)
        result = cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++)
        result = launch(stream, ns);
    if (result == CUDA_SUCCESS)
        result = cuStreamEndCapture(stream, &graph);
    if (result == CUDA_SUCCESS)
        result = cuGraphInstantiateWithFlags(&executable, graph, 0);
    if (result == CUDA_SUCCESS)
        result = cuGraphLaunch(executable, stream);
    return result == CUDA_SUCCESS ? cuStreamSynchronize(stream) : result;
}

static void fork_one(int uses_cuda)
{
    pid_t child = fork();
    if (child == 0) {
        char byte;
        if (uses_cuda) {
            begin();
            exit(launch(NULL, 1000) == CUDA_SUCCESS && cuCtxSynchronize() == CUDA_SUCCESS && complaints == 0 ? 0 : 1);
        }
        while (read(STDIN_FILENO, &byte, 1) > 0) {
        }
        _exit(0);
    }
    int status = 0;
    if (uses_cuda)
        waitpid(child, &status, 0);
    say("child %d", uses_cuda ? status : (int)child);
}

static void tell_state(void)
{
    const struct nvshare_gpu state = of_hook();
    say("state %u %llu %u %u %llu", state.lease, (unsigned long long)state.lease_id, state.waiters, state.waiting_threads,
        (unsigned long long)state.calls);
}

static void yield_lease(void)
{
    int (*yield)(uint32_t);
    *(void **)&yield = dlsym(RTLD_DEFAULT, "nvshare_yield");
    say(yield != NULL && yield(0) == 0 ? "yielded" : "not yielded");
}

static void take_step(void)
{
    void (*step)(void);
    *(void **)&step = dlsym(RTLD_DEFAULT, "nvshare_step");
    if (step != NULL)
        step();
    say(step != NULL ? "stepped" : "not stepped");
}

static unsigned count_threads(void)
{
    unsigned count = 0;
    DIR *tasks = opendir("/proc/self/task");
    for (struct dirent *entry; tasks != NULL && (entry = readdir(tasks)) != NULL;)
        count += entry->d_name[0] != '.';
    closedir(tasks);
    return count;
}

static CUdeviceptr kept;

/* As of a static object of C++: exit() comes to it after the handlers that were registered later, the driver's among them. */
__attribute__((destructor)) static void use_late(void)
{
    CUdeviceptr more;
    if (kept != 0)
        say("late %d %d %d %d", launch(NULL, 1000), cuCtxSynchronize(), cuMemAlloc(&more, 4096), cuMemFree(kept));
}

int main(void)
{
    char line[128], word[32];
    unsigned long long first, second;
    pthread_t thread;
    bool begun = false;
    setvbuf(stdin, NULL, _IONBF, 0);
    sem_init(&unblocked, 0, 0);
    say("ready");
    while (fgets(line, sizeof line, stdin) != NULL) {
        first = second = 0;
        if (sscanf(line, "%31s %llu %llu", word, &first, &second) < 1)
            continue;
        if (!begun && strcmp(word, "threads") != 0 && strcmp(word, "fork") != 0) {
            begin();
            begun = true;
        }
        if (strcmp(word, "gpu") == 0) {
            begin_on((int)first);
            say("gpu");
        } else if (strcmp(word, "launch") == 0) {
            say(launch(NULL, first) == CUDA_SUCCESS ? "launched" : "failed");
        } else if (strcmp(word, "background") == 0) {
            say(pthread_create(&thread, NULL, in_background, (void *)(uintptr_t)first) == 0 ? "begun" : "failed");
        } else if (strcmp(word, "count") == 0) {
            CUresult result = CUDA_SUCCESS;
            for (unsigned long long i = 0; i < first && result == CUDA_SUCCESS; i++)
                result = launch(NULL, second);
            say(result == CUDA_SUCCESS ? "counted" : "failed");
        } else if (strcmp(word, "block") == 0) {
            say(block(NULL) == CUDA_SUCCESS ? "blocked" : "failed");
        } else if (strcmp(word, "host") == 0) {
            say(host((unsigned)first) == CUDA_SUCCESS ? "blocked" : "failed");
        } else if (strcmp(word, "behind") == 0) {
            say(behind() == CUDA_SUCCESS ? "launched" : "failed");
        } else if (strcmp(word, "copy-behind") == 0) {
            say(pthread_create(&thread, NULL, copy_behind, NULL) == 0 ? "begun" : "failed");
        } else if (strcmp(word, "driven") == 0) {
            say("driven %d", driven);
        } else if (strcmp(word, "block-apart") == 0) {
            if (pthread_create(&thread, NULL, block_apart, NULL) != 0)
                say("failed");
        } else if (strcmp(word, "unblock") == 0) {
            say(sem_post(&unblocked) == 0 ? "unblocked" : "failed");
        } else if (strcmp(word, "storm") == 0) {
            say(storm((unsigned)first, second) ? "stormed" : "failed");
        } else if (strcmp(word, "sync") == 0) {
            say(cuCtxSynchronize() == CUDA_SUCCESS ? "synchronised" : "failed");
        } else if (strcmp(word, "alloc") == 0) {
            CUdeviceptr pointer;
            CUresult result = cuMemAlloc(&pointer, first);
            say(result == CUDA_SUCCESS ? "allocated" : "refused %d", (int)result);
        } else if (strcmp(word, "captured") == 0) {
            say("captured %d", (int)captured((unsigned)first, second));
        } else if (strcmp(word, "fork") == 0 || strcmp(word, "idle-child") == 0) {
            fork_one(strcmp(word, "fork") == 0);
        } else if (strcmp(word, "state") == 0) {
            tell_state();
        } else if (strcmp(word, "yield") == 0) {
            yield_lease();
        } else if (strcmp(word, "step") == 0) {
            take_step();
        } else if (strcmp(word, "threads") == 0) {
            say("threads %u", count_threads());
        } else if (strcmp(word, "open") == 0) {
            say(dlopen(getenv("PLUGIN"), RTLD_NOW) != NULL ? "opened" : "%s", dlerror());
        } else if (strcmp(word, "late") == 0) {
            say(cuMemAlloc(&kept, 4096) == CUDA_SUCCESS ? "late" : "failed");
        } else if (strcmp(word, "exec") == 0) {
            unsetenv("LD_PRELOAD");
            execlp("cat", "cat", (char *)NULL);
        } else if (strcmp(word, "exit") == 0) {
            exit(0);
        } else {
            say("what?");
        }
    }
    return 0;
}
