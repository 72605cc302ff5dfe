/* The hook's part of the bypass detector (verify.h): whether the calling thread is inside the gate, and a call before _exit.
 *
 * _exit runs no exit handler, and Python's multiprocessing ends its processes by it, so their reports would stay incomplete.  The hook wraps
 * _exit in every process; outside of `nvshare-run --verify` the wrapper calls the real function at once.
 */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "base/base.h"
#include "base/process/thread.h"
#include "driver/libc_symbols.h"
#include "gate/gate.h"
#include "nvshare.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The hook's own threads move memory while the gate is closed: this is neither a bypass nor work of the application. */
NVS_EXPORT uint32_t nvshare_gate_depth(void)
{
    const nvs_slot *slot = nvs_self;
    if (slot != NULL && atomic_load_explicit(&slot->active, memory_order_relaxed) != 0) /* written by this thread only */
        return 1;
    return nvs_thread_is_own() ? UINT32_MAX : 0;
}

static _Atomic(nvshare_at_end *) before_end; /* release and acquire: its data was written before */
static _Atomic(void (*)(int)) next_exit;     /* relaxed: one word; NULL: not found */

__attribute__((constructor)) static void at_load(void)
{
    nvs_dlsym_function *look_up = nvs_libc_dlsym();
    void *found = look_up != NULL ? look_up(RTLD_NEXT, "_exit") : NULL;
    void (*next)(int);
    memcpy(&next, &found, sizeof next); /* POSIX allows it */
    atomic_store_explicit(&next_exit, next, memory_order_relaxed); /* see its declaration */
}

NVS_EXPORT void nvshare_before_quick_exit(nvshare_at_end *function)
{
    atomic_store_explicit(&before_end, function, memory_order_release); /* see its declaration */
}

/* Also called in a child of vfork, on its parent's memory, and in signal handlers, so it writes nothing. */
NVS_EXPORT void _exit(int status)
{
    nvshare_at_end *last = atomic_load_explicit(&before_end, memory_order_acquire); /* see its declaration */
    void (*next)(int) = atomic_load_explicit(&next_exit, memory_order_relaxed);    /* see its declaration */
    if (NVS_UNLIKELY(last != NULL))
        last();
    if (next != NULL)
        next(status);
    for (;;)
        syscall(SYS_exit_group, status);
}

NVS_EXPORT void _Exit(int status)
{
    _exit(status);
}
