/* Serves remote programs as Lupine's server does: it forks before any call of the driver, each connection gets a process and a context, and
 * several threads call the driver for it.
 *
 * Prints its port on 127.0.0.1.  A connection sends lines: `begin`, then `fill MIB VALUE`, `run ROUNDS`, `check`.  The answer of each of these is one
 * line: a code of the driver, or 1 for memory that has changed.
 */
#include "cuda_program.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>

enum { THREADS = 4 };

static CUcontext context;
static CUdeviceptr memory;
static size_t bytes;
static unsigned value;
static int rounds;

static void *launch_some(void *unused)
{
    (void)unused;
    OK(cuCtxSetCurrent(context));
    const CUstream stream = new_stream();
    for (int i = 0; i < rounds; i++) {
        OK(launch(stream, 200000));
        OK(cuStreamSynchronize(stream));
    }
    OK(cuStreamDestroy(stream));
    return NULL;
}

static int run(void)
{
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++)
        pthread_create(&threads[i], NULL, launch_some, NULL);
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    return complaints != 0;
}

static int fill(size_t mib, unsigned with)
{
    CUdeviceptr made = 0;
    const CUresult result = cuMemAlloc(&made, mib * MIB);
    if (result != CUDA_SUCCESS)
        return (int)result;
    memory = made, bytes = mib * MIB, value = with;
    OK(cuMemsetD32(memory, value, bytes / 4));
    return 0;
}

static void serve(int connection)
{
    FILE *in = fdopen(connection, "r"), *out = fdopen(dup(connection), "w");
    char line[128];
    if (fgets(line, sizeof line, in) == NULL || strcmp(line, "begin\n") != 0)
        exit(0); /* somebody looks for a server that had this port before */
    OK(cuInit(0));
    OK(cuCtxCreate(&context, NULL, 0, 0));
    load();
    while (fgets(line, sizeof line, in) != NULL) {
        size_t mib;
        unsigned with;
        int result = 1;
        if (sscanf(line, "fill %zu %u", &mib, &with) == 2)
            result = fill(mib, with);
        else if (sscanf(line, "run %d", &rounds) == 1)
            result = run();
        else if (strcmp(line, "check\n") == 0)
            result = !holds(memory, bytes, value);
        fprintf(out, "%d\n", result);
        fflush(out);
    }
    exit(complaints != 0);
}

int main(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof at;
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) != 0 || listen(listener, 8) != 0 || getsockname(listener, (struct sockaddr *)&at, &length) != 0)
        return 2;
    printf("%d\n", ntohs(at.sin_port));
    fflush(stdout);
    signal(SIGCHLD, SIG_IGN);
    for (;;) {
        const int connection = accept(listener, NULL, NULL);
        if (connection < 0)
            return 2;
        if (fork() == 0) {
            close(listener);
            serve(connection);
        }
        close(connection);
    }
}
