/* Definitions for all files of the hook, without state.
 *
 * Rules of this library in a process of an application:
 *  - it never exits, aborts or hangs the application, and prints only what NVSHARE_LOG asks for, and each warning once;
 *  - it passes a call that it does not understand to the real function;
 *  - it holds no lock during calls of the CUDA driver or dlsym on an application's thread, except calls that name a pool (memory/pools/figures.h).
 *
 * Lock order (outer first): allocation registry, context registry, host share, agent mailbox, swap, host
 * pool.
 * Locks held without any other: streams (contexts/streams.c), moves (coord/memory/moves.c), the pipeline of a move
 * (swap/pipeline.c), exports (ipc/export.c), imports (ipc/import.c),
 * connections (ipc/connection.c), marks (inflight/marks.c), captures (inflight/captures.c), host functions (gate/host_functions.c),
 * ended threads (inflight/pacing.c), figures of pools (memory/pools/figures.c).
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

#endif
