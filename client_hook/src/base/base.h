/* Words that every file of the hook uses.  Nothing here has state.
 *
 * Rules of this library, which is a guest in somebody's process:
 *  - it never exits, aborts or hangs the application, and prints nothing unless NVSHARE_LOG asks for it or
 *    something must be said once;
 *  - what it is not sure of, it lets through to the real function;
 *  - it holds no lock while it calls the CUDA driver or dlsym from an application's thread.
 *
 * Lock order (outer first): allocation registry, context registry, host share, agent mailbox, swap, host
 * pool.
 * Locks held without any other: streams (contexts/streams.c), moves (coord/memory/moves.c), the pipeline of a move
 * (swap/pipeline.c), exports (ipc/export.c), imports (ipc/import.c),
 * connections (ipc/connection.c), marks (inflight/marks.c), captures (inflight/captures.c),
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

/* Variables that the child of a fork writes as it begins stand together, and so do the functions that write them: each page that
 * they touch is a page fault. */
#define NVS_FORK_STATE __attribute__((section("nvs_fork")))
#define NVS_FORK_CODE __attribute__((cold))

#define NVS_MAX_GPUS 32u          /* as MAX_GPUS_PER_CLIENT in coordinator/protocol/messages.py */
#define NVS_NO_GPU UINT32_MAX     /* "not known": the call falls through ungated */

typedef void (*nvs_function)(void); /* some function; cast before use */

typedef enum nvs_status {
    NVS_OK = 0,
    NVS_TIMED_OUT,   /* the deadline passed first */
    NVS_REFUSED,     /* a limit, or the coordinator, says no */
    NVS_UNAVAILABLE, /* a library, function or peer is not there */
    NVS_MALFORMED,   /* the peer sent something that the protocol does not allow */
    NVS_NO_MEMORY,   /* of the host */
    NVS_CUDA_FAILED, /* a driver call failed; the CUresult travels beside it */
} nvs_status;

#endif
