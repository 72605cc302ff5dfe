/* Start and end of the hook in a process, and the wiring: the only file that knows all folders.
 *
 * Rules that every file here lives by.
 *  Start: the constructor reads the environment and, if NVSHARE_SOCKET is set, closes the gates.  No thread, no socket,
 *    no allocation, no CUDA: most processes that carry the hook never use CUDA.  Everything else starts with cuInit, or with
 *    the first thread that finds a gate closed or asks for memory.
 *  Fork: the child has one thread, and none of ours.  It closes its copy of the connection, so that its parent's death is
 *    still noticed, and begins as a fresh process: gates closed, no lease.  Nothing in the atfork handlers allocates or
 *    takes a lock that another thread may hold (base/process/fork.h).
 *  Exec: every descriptor of ours is close-on-exec; the new image runs the constructor again.
 *  Re-entrancy: a thread inside a gated call passes every gate (its slot says so); a signal handler that interrupts the fast
 *    path and calls CUDA is nested in it.  The agent thread uses real functions only and never passes a gate.
 *  Signals: the agent blocks all of them: an application's handler never runs on a thread of ours.
 *  errno: whatever we do in an application's thread leaves it as it was.
 *  Teardown: exit() says goodbye within 50 ms at most; after that nothing of ours calls CUDA, and a thread that
 *    still submits work is let through rather than left hanging.  _exit, exec and death need no handler: the connection
 *    closes with the process.
 *
 * Non-goals: anything beyond the above.
 */
#include "base/port.h"
#include "base/process/fork.h"
#include "contexts/context.h"
#include "contexts/streams.h"
#include "coord/agent.h"
#include "coord/memory/budget.h"
#include "coord/waiting/python.h"
#include "driver/cuda_api.h"
#include "driver/nvml.h"
#include "gate/gate.h"
#include "gate/start.h"
#include "hooks/memory/nvml.h"
#include "hooks/work/graph_gpus.h"
#include "hooks/work/thunk.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "ipc/ipc.h"
#include "memory/memory.h"
#include "memory/pools/book.h"
#include "memory/pools/figures.h"
#include "memory/quota/graph_memory.h"
#include "memory/quota/pins.h"
#include "memory/records/registry.h"
#include "swap/swap.h"

/* What a folder needs of one that stands above it.  Constants, not registered at start: an entry point may be reached before our
 * constructor has run. */
const nvs_port nvs_coordinator = {
    .wait_for_lease = nvs_agent_wait_for_lease,
    .attach = nvs_agent_attach,
    .memory_changed = nvs_agent_memory_changed,
    .reserve = nvs_agent_reserve,
    .reserve_pins = nvs_agent_reserve_pins,
    .reserve_host = nvs_agent_reserve_host,
};
void *(*const nvs_thunk_for)(const char *name, void *target) = nvs_thunk_make;
void *(*const nvs_nvml_wrapper)(nvs_nvml_id id) = nvs_nvml_wrapper_of;
const nvs_backend *const nvs_memory_chunked = &nvs_backend_swap;
void (*const nvs_swap_freed)(uint32_t gpu, CUdeviceptr address) = nvs_ipc_withdraw;
void (*const nvs_fork_handlers[])(void) = {
    nvs_gate_after_fork, nvs_pacing_after_fork, nvs_marks_after_fork, nvs_agent_after_fork, nvs_python_after_fork, nvs_registry_after_fork,
    nvs_quota_after_fork, nvs_pins_after_fork, nvs_graph_memory_after_fork, nvs_pool_figures_after_fork, nvs_pool_book_after_fork,
    nvs_swap_after_fork, nvs_graphs_after_fork, nvs_captures_after_fork, nvs_contexts_after_fork, nvs_streams_after_fork,
    nvs_ipc_exports_after_fork, nvs_ipc_imports_after_fork, NULL,
};

__attribute__((constructor)) static void at_load(void)
{
    nvs_start();
}

__attribute__((destructor)) static void at_exit(void)
{
    nvs_agent_goodbye();
}
