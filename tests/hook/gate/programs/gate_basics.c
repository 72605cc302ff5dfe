/* The gate without threads that race: what it does to one caller, to errno, to a fork. */
#include "base/base.h"
#include "base/process.h"
#include "gate/gate.h"

#include "must.h"

#include <errno.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int waits;
static bool let_through;

static void wait_for_lease(uint32_t gpu)
{
    waits++;
    errno = ENOSYS;
    if (let_through)
        nvs_gate_set_dead(gpu, true);
    else
        nvs_gate_open(gpu, false);
}

const nvs_port nvs_coordinator = {.wait_for_lease = wait_for_lease};

int main(void)
{
    nvs_slot *slot;
    nvs_gate_init();

    /* Not armed: open, counted, never waits. */
    slot = nvs_gate_enter(0);
    MUST(slot != NULL && nvs_gate_inside(0) && !nvs_gate_inside(1));
    MUST(!nvs_gate_leave(slot, 0) && !nvs_gate_inside(0) && nvs_gate_calls(0) == 1);
    MUST(nvs_gate_enter(NVS_NO_GPU) == NULL && !nvs_gate_leave(NULL, NVS_NO_GPU));

    /* Armed: the first caller waits, errno stays. */
    nvs_gate_arm();
    errno = ERANGE;
    slot = nvs_gate_enter(0);
    MUST(waits == 1 && errno == ERANGE && nvs_gate_inside(0));

    /* Inside, with the gate closed meanwhile: neither this nor another GPU's gate stops the thread; the closer times out. */
    MUST(nvs_gate_close(0, nvs_now_ns() + 1000000) == NVS_TIMED_OUT);
    nvs_slot *nested = nvs_gate_enter(5);
    MUST(waits == 1 && !nvs_gate_leave(nested, 5));
    MUST(!nvs_gate_leave(slot, 0) && nvs_gate_close(0, 0) == NVS_OK);

    /* Paced: the caller is told; then not any more. */
    nvs_gate_open(0, true);
    MUST(nvs_gate_leave(nvs_gate_enter(0), 0));
    nvs_gate_open(0, false);
    (void)nvs_gate_unseen(nvs_self, 3);
    MUST(!nvs_gate_leave(nvs_gate_enter(0), 0));

    /* Alone: one in so many, and again until somebody has looked; after what may be much, at once. */
    MUST(!nvs_gate_leave(nvs_gate_enter(0), 0));
    MUST(nvs_gate_leave(nvs_gate_enter(0), 0) && nvs_gate_leave(nvs_gate_enter(0), 0));
    MUST(nvs_gate_unseen(nvs_self, 1000) == 4 && nvs_gate_unseen(nvs_self, 1000) == 0);
    int graph, other;
    MUST(!nvs_gate_leave(nvs_gate_enter(0), 0) && nvs_gate_leave_graph(nvs_gate_enter(0), 0, &graph));
    MUST(nvs_gate_unseen(nvs_self, 1000) == 2);
    /* The same graph again: one in NVS_GRAPH_STRIDE, and nothing unseen gets lost; another one, at once. */
    for (unsigned i = 1; i < NVS_GRAPH_STRIDE; i++)
        MUST(!nvs_gate_leave_graph(nvs_gate_enter(0), 0, &graph));
    MUST(nvs_gate_leave_graph(nvs_gate_enter(0), 0, &graph) && nvs_gate_unseen(nvs_self, 1000) == NVS_GRAPH_STRIDE);
    MUST(nvs_gate_leave_graph(nvs_gate_enter(0), 0, &other) && nvs_gate_unseen(nvs_self, 1000) == 1);

    /* Waiting for work is use, but no reason to wait for the thread. */
    slot = nvs_gate_await(3);
    MUST(slot == nvs_self && nvs_gate_in_use(3) && !nvs_gate_in_use(2) && !nvs_gate_inside(3));
    MUST(nvs_gate_close(3, 0) == NVS_OK);
    nvs_gate_awaited(slot);
    nvs_slot *asking = nvs_gate_await(NVS_NO_GPU); /* announced, but of no GPU */
    MUST(!nvs_gate_in_use(3) && asking != NULL);
    nvs_gate_awaited(asking);

    /* The driver has ended: through a closed gate. */
    MUST(nvs_gate_close(0, nvs_now_ns() + 1000000) == NVS_OK);
    let_through = true;
    slot = nvs_gate_enter(0);
    MUST(waits == 2 && slot != NULL && !nvs_gate_leave(slot, 0));
    let_through = false;
    nvs_gate_set_dead(0, false);

    /* Fork inside a call with the gate open: the child is outside, before a closed gate; the parent is as it was. */
    nvs_gate_open(0, false);
    slot = nvs_gate_enter(0);
    pid_t child = fork();
    if (child == 0) {
        nvs_gate_after_fork();
        waits = 0;
        bool clean = !nvs_gate_inside(0) && nvs_gate_waiting(0) == 0;
        (void)nvs_gate_leave(nvs_gate_enter(0), 0);
        _exit(clean && waits == 1 && nvs_gate_close(0, nvs_now_ns() + 1000000) == NVS_OK ? 0 : 1);
    }
    int status = -1;
    MUST(waitpid(child, &status, 0) == child && status == 0);
    MUST(nvs_gate_inside(0) && !nvs_gate_leave(slot, 0));
    puts("good");
    return 0;
}
