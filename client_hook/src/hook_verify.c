/* What the hook tells the bypass detector (verify.h): is the calling thread inside the gate? */
#define _GNU_SOURCE /* gettid */
#include "base.h"
#include "gate.h"
#include "nvshare.h"

#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The agent's thread moves memory while the gate is closed to all others: that is no bypass.  It is told by its name, as the
 * thread that started the process cannot be meant. */
static bool on_agent_thread(void)
{
    static _Thread_local int known; /* 0: not asked yet, 1: the agent's, 2: another */
    char name[16] = "";
    if (known == 0) {
        (void)prctl(PR_GET_NAME, name, 0, 0, 0);
        known = strcmp(name, "nvshare") == 0 && syscall(SYS_gettid) != getpid() ? 1 : 2;
    }
    return known == 1;
}

NVS_EXPORT uint32_t nvshare_gate_depth(void)
{
    const nvs_slot *slot = nvs_self;
    if (slot != NULL && slot->depth != 0)
        return slot->depth;
    return on_agent_thread() ? UINT32_MAX : 0;
}
