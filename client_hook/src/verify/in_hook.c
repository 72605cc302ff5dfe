/* What the hook does for the bypass detector (verify.h): is the calling thread inside the gate, and is the process about to end?
 *
 * _exit runs no handler, and Python's multiprocessing ends its processes by it: without a word from us nobody would know what
 * they did.  The function is ours in every process; outside of `nvshare-run --verify` it hands on at once.
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

/* Our own threads move memory while the gate is closed to all others: that is no bypass, and no work of the application. */
NVS_EXPORT uint32_t nvshare_gate_depth(void)
{
    const nvs_slot *slot = nvs_self;
    if (slot != NULL && atomic_load_explicit(&slot->active, memory_order_relaxed) != 0) /* written by this thread only */
        return 1;
    return nvs_thread_is_own() ? UINT32_MAX : 0;
}

static _Atomic(nvshare_at_end *) before_end;         /* release and acquire: whatever it needs was set up before */
static _Atomic(void (*)(int)) next_exit;             /* relaxed: one word; NULL: not found */

__attribute__((constructor)) static void at_load(void)
{
    nvs_dlsym_function *look_up = nvs_libc_dlsym();
    void *found = look_up != NULL ? look_up(RTLD_NEXT, "_exit") : NULL;
    void (*next)(int);
    memcpy(&next, &found, sizeof next); /* POSIX promises that it works */
    atomic_store_explicit(&next_exit, next, memory_order_relaxed); /* see its declaration */
}

NVS_EXPORT void nvshare_before_quick_exit(nvshare_at_end *function)
{
    atomic_store_explicit(&before_end, function, memory_order_release); /* see its declaration */
}

/* Also called in a child of vfork, on its parent's memory, and in signal handlers: nothing but the word is touched. */
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
