/* Start and end of the hook in a process, and the wiring: the only file that knows all folders.
 *
 * Rules of all files:
 *  Start: the constructor reads the environment and, if NVSHARE_SOCKET is set, closes the gates.  It makes no thread, socket or allocation and
 *    calls no CUDA, as most processes with the hook never use CUDA.  The agent starts with cuInit, or with the first thread that waits at a gate
 *    or allocates memory.
 *  Fork: the child has none of the hook's threads.  It closes its copy of the connection, so that the coordinator notices the parent's end, and
 *    starts as a new process: gates closed, no lease.  An atfork handler allocates nothing and takes no lock that another thread may hold
 *    (base/process.h).
 *  Exec: every descriptor of the hook is close-on-exec; the new image runs the constructor again.
 *  Re-entrancy: a thread inside a gated call passes every gate (its slot records the call), also in a signal handler.  The agent thread calls
 *    real functions only and passes no gate.
 *  Signals: the hook's threads block all of them, so no handler of the application runs there.
 *  errno: the hook's functions preserve it on an application's thread.
 *  Teardown: exit() runs the application's handlers and destructors that were registered after cuInit as at any time, then the hook's, which waits at
 *    most 50 ms for the agent to release its leases, then the driver's.  From then on each call gets the driver's CUDA_ERROR_DEINITIALIZED without a
 *    lease.  _exit, quick_exit, exec and death need no handler: the connection closes with the process.
 */
#include "base/base.h"
#include "base/process.h"
#include "contexts/context.h"
#include "coord/agent.h"
#include "coord/state.h"
#include "driver/cuda_api.h"
#include "driver/nvml.h"
#include "gate/gate.h"
#include "gate/host_functions.h"
#include "hooks/graph.h"
#include "hooks/hooks.h"
#include "inflight/captures.h"
#include "inflight/marks.h"
#include "inflight/pacing.h"
#include "ipc/ipc.h"
#include "memory/memory.h"
#include "memory/pools.h"
#include "memory/registry.h"
#include "swap/swap.h"

/* Functions that a folder needs of a higher one.  They are constants, because an entry point may be called before the constructor has run. */
const nvs_port nvs_coordinator = {
    .wait_for_lease = nvs_agent_wait_for_lease,
    .attach = nvs_agent_attach,
    .memory_changed = nvs_agent_memory_changed,
    .link = nvs_agent_link,
    .reserve = nvs_agent_reserve,
    .reserve_pins = nvs_agent_reserve_pins,
    .reopen = nvs_agent_reopen,
    .reserve_host = nvs_agent_reserve_host,
};
void *(*const nvs_thunk_for)(const char *name, void *target) = nvs_thunk_make;
void *(*const nvs_nvml_wrapper)(nvs_nvml_id id) = nvs_nvml_wrapper_of;
const nvs_backend *const nvs_memory_chunked = &nvs_backend_swap;
void (*const nvs_swap_freed)(uint32_t gpu, CUdeviceptr address) = nvs_ipc_withdraw;
void (*const nvs_fork_handlers[])(void) = {
    nvs_gate_after_fork, nvs_pacing_after_fork, nvs_marks_after_fork, nvs_agent_after_fork, nvs_registry_after_fork,
    nvs_quota_after_fork, nvs_memory_after_fork, nvs_pools_after_fork, nvs_swap_after_fork, nvs_graphs_after_fork, nvs_captures_after_fork,
    nvs_host_functions_after_fork, nvs_contexts_after_fork, nvs_ipc_exports_after_fork, nvs_ipc_imports_after_fork, NULL,
};

__attribute__((constructor)) static void at_load(void)
{
    nvs_start();
}
