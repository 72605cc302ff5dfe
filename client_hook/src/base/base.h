/* Definitions for all files of the hook, without state.
 *
 * Rules of this library in a process of an application:
 *  - it never exits, aborts or hangs the application, and prints only what NVSHARE_LOG asks for, and each warning once;
 *  - it passes a call that it does not understand to the real function;
 *  - it holds no lock during calls of the CUDA driver or dlsym on an application's thread, except calls that name a pool (memory/pools.h).
 *
 * Lock order (outer first): allocation registry, context registry, host share, agent mailbox, swap, host
 * pool.
 * Locks held without any other: streams (contexts/context.c), movers (coord/mover.c), the pipeline of a move
 * (swap/pipeline.c), exports and their server's start (ipc/export.c), imports (ipc/import.c),
 * connections (ipc/import.c), marks (inflight/marks.c), captures (inflight/captures.c), host functions (gate/host_functions.c),
 * ended threads (inflight/pacing.c), figures of pools (memory/pools.c).
 * The export server's thread holds a lock around its calls of the driver (ipc/export.c), and takes others meanwhile.
 * No other lock exists.
 */
#ifndef NVS_BASE_H
#define NVS_BASE_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL /* every version of every function under its exported name */
#endif
#include <cuda.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define NVS_VERSION "0.2.0" /* of the release; tests hold it against pyproject.toml */

#define NVS_EXPORT __attribute__((visibility("default")))
#define NVS_LIKELY(x) __builtin_expect(!!(x), 1)
#define NVS_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* Groups the variables that a fork's child writes at its start, and the functions that write them: each page costs a page fault. */
#define NVS_FORK_STATE __attribute__((section("nvs_fork")))
#define NVS_FORK_CODE __attribute__((cold))

#define NVS_MAX_GPUS 32u          /* as MAX_GPUS_PER_CLIENT in coordinator/protocol/messages.py */
#define NVS_NO_GPU UINT32_MAX     /* not known: the call is not gated */

typedef void (*nvs_function)(void); /* some function; cast before use */

typedef enum nvs_status {
    NVS_OK = 0,
    NVS_TIMED_OUT,   /* the deadline passed first */
    NVS_REFUSED,     /* by a limit, or the coordinator */
    NVS_UNAVAILABLE, /* a library, function or peer is missing */
    NVS_NO_MEMORY,   /* of the host */
    NVS_CUDA_FAILED, /* a driver call failed; the CUresult is returned separately */
} nvs_status;

/* Requests of the layers below coord/ to the coordinator.  coord/ implements them; init.c fills the table. */
typedef struct nvs_port {
    /* Blocks the calling thread until calls pass the gate of this GPU, or the wait is stopped. */
    void (*wait_for_lease)(uint32_t gpu);

    /* Attaches the GPU; returns when its settings have come, or after a bounded wait.  Before the first allocation or memory figure; idempotent, and quick
     * afterwards. */
    void (*attach)(uint32_t gpu);

    /* The usage has changed; a report follows soon, for several changes together. */
    void (*memory_changed)(uint32_t gpu);

    /* Makes the reservation on this GPU at least `total_bytes`; waits for the answer.  NVS_REFUSED: out of memory.
     * NVS_UNAVAILABLE: no coordinator answers, and only the local limit applies. */
    nvs_status (*reserve)(uint32_t gpu, uint64_t total_bytes, uint64_t lacking_bytes);

    /* The same for pinned memory, `total_bytes` in all.  NVS_UNAVAILABLE, too, if the coordinator takes no such requests. */
    nvs_status (*reserve_pins)(uint32_t gpu, uint64_t total_bytes);

    /* One of these GPUs, a bit each, reaches another: from now on all of them run, or none.  Returns when no work passes that has a part of their leases
     * only.  Idempotent, and quick afterwards. */
    void (*link)(uint32_t gpus);

    /* Soon closes the open gate of this GPU until submitted work is done and nvs_memory_open_gates agrees.  NVS_UNAVAILABLE: there is no agent. */
    nvs_status (*reopen)(uint32_t gpu);

    /* Requests `total_bytes` as this program's share of the node's host memory, and waits, with a limit, until host/pool.h has the answer; returns at once
     * without a connection. */
    void (*reserve_host)(uint64_t total_bytes);
} nvs_port;

extern const nvs_port nvs_coordinator __attribute__((visibility("hidden")));

#endif
