/* Python's signal handlers, run while the main thread of a Python program waits for a GPU, as they run in a sleep.
 *
 * CPython's C handler only sets a flag; the handler that the program has set runs when the main thread asks for it, holding
 * the GIL.  docs/decisions/interrupted-waits.md says what happens with an exception that it raises.
 *
 * Invariants: nothing happens without a signal, without CPython, and in other threads.  The waiting thread asks for the
 * GIL only after another thread of ours has got it: a thread that has the GIL and waits for a lock of the waiting one
 * costs the handler, and never the lease.
 */
#ifndef NVS_PYTHON_H
#define NVS_PYTHON_H

#include "base/base.h"

#define NVS_PYTHON_LOOK_NS 20000000u

/* In a thread that wakes before the gate of this GPU and has to wait on.  `signalled`: a signal has ended the sleep.
 * `wanted` is the wait's own, false at its begin; while it is true the thread calls again after NVS_PYTHON_LOOK_NS.
 * True: a handler has raised an exception, which Python raises as soon as the call has returned. */
bool nvs_python_handlers(uint32_t gpu, bool signalled, bool *wanted);

void nvs_python_after_fork(void);

#endif
