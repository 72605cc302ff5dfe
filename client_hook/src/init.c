/* Start, environment, fork and end of the hook in a process.
 *
 * Rules that every file here lives by.
 *  Start: the constructor reads the environment and, if NVSHARE_SOCKET is set, closes the gates.  No thread, no socket,
 *    no allocation, no CUDA: most processes that carry the hook never use CUDA.  Everything else starts with cuInit, or with
 *    the first thread that finds a gate closed or asks for memory.
 *  Fork: the child has one thread, and none of ours.  It closes its copy of the connection, so that its parent's death is
 *    still noticed, and begins as a fresh process: gates closed, no lease.  Nothing in the atfork handlers allocates or
 *    takes a lock that another thread may hold.  The
 *    handlers are registered when the agent begins: before that no GPU is known, so nothing has state that a child must lose.
 *    They write only to what the parent has written, and that stands together (NVS_FORK_STATE): the kernel copies each page
 *    that they touch.
 *  Exec: every descriptor of ours is close-on-exec; the new image runs the constructor again.
 *  Re-entrancy: a thread inside a gated call passes every gate (its slot says so); a signal handler that interrupts the fast
 *    path and calls CUDA is nested in it.  The agent thread uses real functions only and never passes a gate.
 *  Signals: the agent blocks all of them: an application's handler never runs on a thread of ours.
 *  errno: whatever we do in an application's thread leaves it as it was.
 *  Teardown: exit() says goodbye within 50 ms at most; after that nothing of ours calls CUDA, and a thread that
 *    still submits work is let through rather than left hanging.  _exit, exec and death need no handler: the connection
 *    closes with the process.
 *
 * May not go here: anything beyond the above.
 */
#define _GNU_SOURCE /* program_invocation_short_name */
#include "coord/agent.h"
#include "gate/gate.h"
#include "hooks/work/graph_gpus.h"
#include "base/log.h"
#include "memory/memory.h"
#include "gate/pacing/pacing.h"
#include "coord/protocol/wire.gen.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

nvs_settings nvs_config;

uint64_t nvs_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

struct unit {
    const char *name;
    uint64_t factor;
};

static const struct unit size_units[] = {
    {"", 1},          {"B", 1},           {"KiB", 1ull << 10}, {"MiB", 1ull << 20}, {"GiB", 1ull << 30}, {"TiB", 1ull << 40},
    {"KB", 1000},     {"MB", 1000000},    {"GB", 1000000000},  {"TB", 1000000000000}, {"K", 1ull << 10},
    {"M", 1ull << 20}, {"G", 1ull << 30}, {"T", 1ull << 40},   {NULL, 0},
};
static const struct unit time_units[] = {
    {"", 1000000000}, {"s", 1000000000}, {"ms", 1000000}, {"us", 1000}, {"ns", 1}, {"min", 60000000000}, {NULL, 0},
};

/* A whole or decimal number and a unit.  False when it is not that or too large. */
static bool parse_quantity(const char *text, const struct unit *units, uint64_t *out)
{
    uint64_t whole = 0;
    double part = 0, scale = 0.1;
    const char *at = text;
    if (*at < '0' || *at > '9')
        return false;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (whole > (UINT64_MAX - 9) / 10)
            return false;
        whole = whole * 10 + (uint64_t)(*at - '0');
    }
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++, scale /= 10)
            part += scale * (*at - '0');
    while (*at == ' ')
        at++;
    for (; units->name != NULL; units++) {
        if (strcmp(at, units->name) != 0)
            continue;
        if (whole > (UINT64_MAX >> 1) / units->factor)
            return false;
        *out = whole * units->factor + (uint64_t)(part * (double)units->factor);
        return true;
    }
    return false;
}

static void copy_text(char *out, size_t size, const char *text)
{
    size_t length = strlen(text);
    if (length >= size)
        length = size - 1;
    memcpy(out, text, length);
    out[length] = 0;
    /* Cut at a character's border; what is no UTF-8 at all is shown as it can be. */
    while (length > 0 && !nvs_wire_text_valid((const uint8_t *)out, length) && length + 4 > size - 1)
        out[--length] = 0;
    for (size_t i = 0; i < length && !nvs_wire_text_valid((const uint8_t *)out, length); i++)
        if ((unsigned char)out[i] >= 0x80)
            out[i] = '?';
}

static int read_choice(const char *variable, const char *const *words, int preset)
{
    const char *text = getenv(variable);
    if (text == NULL || text[0] == 0)
        return preset;
    for (int i = 0; words[i] != NULL; i++)
        if (strcmp(text, words[i]) == 0)
            return i;
    nvs_log(NVS_LOG_WARNING, "%s=%s is not known; using %s", variable, text, words[preset]);
    return preset;
}

static uint64_t read_quantity(const char *variable, const struct unit *units, const char *example, uint64_t preset)
{
    const char *text = getenv(variable);
    uint64_t value;
    if (text == NULL || text[0] == 0)
        return preset;
    if (parse_quantity(text, units, &value))
        return value;
    nvs_log(NVS_LOG_WARNING, "%s=%s is not a quantity like %s; ignored", variable, text, example);
    return preset;
}

static int32_t read_number(const char *variable, int32_t low, int32_t high, int32_t preset)
{
    const char *text = getenv(variable);
    char *end;
    if (text == NULL || text[0] == 0)
        return preset;
    errno = 0;
    long value = strtol(text, &end, 10);
    if (errno == 0 && *end == 0 && value >= low && value <= high)
        return (int32_t)value;
    nvs_log(NVS_LOG_WARNING, "%s=%s is not a whole number from %d to %d; using %d", variable, text, low, high, preset);
    return preset;
}

static void read_gang(void)
{
    const char *text = getenv("NVSHARE_GANG");
    size_t length = text != NULL ? strlen(text) : 0;
    if (length >= sizeof nvs_config.gang || !nvs_wire_text_valid((const uint8_t *)text, length))
        nvs_log(NVS_LOG_WARNING, "NVSHARE_GANG is longer than %zu bytes or no UTF-8; ignored", sizeof nvs_config.gang - 1);
    else if (length > 0)
        memcpy(nvs_config.gang, text, length + 1);
}

static void read_path(const char *variable, char *out, size_t size)
{
    const char *text = getenv(variable);
    if (text == NULL)
        return;
    if (strlen(text) >= size)
        nvs_log(NVS_LOG_WARNING, "%s is longer than %zu bytes; ignored", variable, size - 1);
    else
        memcpy(out, text, strlen(text) + 1);
}

static void read_environment(void)
{
    static const char *const levels[] = {"off", "error", "warning", "info", "debug", NULL};
    static const char *const modes[] = {"device", "managed", "swap", NULL}; /* in the order of MemoryMode */
    static const char *const losses[] = {"wait", "run", NULL};
    const char *disable = getenv("NVSHARE_DISABLE");
    const char *oversubscribe = getenv("NVSHARE_OVERSUBSCRIBE");
    const char *name = getenv("NVSHARE_NAME");

    nvs_log_level = read_choice("NVSHARE_LOG", levels, NVS_LOG_WARNING);
    read_path("NVSHARE_SOCKET", nvs_config.socket, sizeof nvs_config.socket);
    nvs_config.enabled = nvs_config.socket[0] != 0 && (disable == NULL || disable[0] == 0 || strcmp(disable, "0") == 0);
    if (!nvs_config.enabled)
        return;
    copy_text(nvs_config.name, sizeof nvs_config.name,
              name != NULL && name[0] != 0 ? name : program_invocation_short_name);
    nvs_config.coordinator_user = read_number("NVSHARE_COORDINATOR_USER", -1, INT32_MAX, -1);
    nvs_config.priority = read_number("NVSHARE_PRIORITY", INT32_MIN, INT32_MAX, 0);
    nvs_config.weight = (uint16_t)read_number("NVSHARE_WEIGHT", 1, (int32_t)NVS_WIRE_MAX_WEIGHT, 1);
    read_gang();
    nvs_config.memory_mode = (uint8_t)read_choice("NVSHARE_MEMORY", modes, NVS_MEMORY_MODE_MANAGED);
    nvs_config.memory_limit = read_quantity("NVSHARE_MEMORY_LIMIT", size_units, "4GiB", 0);
    nvs_config.host_limit = read_quantity("NVSHARE_HOST_LIMIT", size_units, "64GiB", 0);
    nvs_config.oversubscribe = oversubscribe != NULL && oversubscribe[0] != 0 && strcmp(oversubscribe, "0") != 0;
    nvs_config.run_on_loss = read_choice("NVSHARE_ON_LOSS", losses, 0) == 1;
    nvs_config.loss_timeout_ns = read_quantity("NVSHARE_LOSS_TIMEOUT", time_units, "30s", 30000000000u);
}

NVS_FORK_CODE static void in_child(void)
{
    int saved = errno;
    nvs_gate_after_fork();
    nvs_pacing_after_fork();
    nvs_agent_after_fork();
    nvs_memory_after_fork();
    nvs_graphs_after_fork();
    errno = saved;
}

static void register_fork_handler(void)
{
    if (pthread_atfork(NULL, NULL, in_child) != 0)
        nvs_log(NVS_LOG_WARNING, "no memory for the fork handler; children of this process must not use CUDA");
}

void nvs_init_fork(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT; /* a child inherits the handler too */
    (void)pthread_once(&once, register_fork_handler);
}

void nvs_init(void)
{
    static atomic_flag begun = ATOMIC_FLAG_INIT;
    if (atomic_flag_test_and_set_explicit(&begun, memory_order_acq_rel)) /* constructors run one after the other */
        return;
    int saved = errno;
    nvs_gate_init();
    read_environment();
    if (nvs_config.enabled)
        nvs_gate_arm();
    errno = saved;
}

__attribute__((constructor)) static void at_load(void)
{
    nvs_init();
}

__attribute__((destructor)) static void at_exit(void)
{
    nvs_agent_goodbye();
}
