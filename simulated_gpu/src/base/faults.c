/* What tests put between a program and this driver: faults of calls, and an observer of calls.
 *
 * Faults come from NVSHARE_SIM_FAULTS, NVSHARE_SIM_MISSING and the C API of simulated_gpu.h.  Rules are appended one by one and dropped
 * all at once.  They have their own lock, because a call is checked before it takes the driver's lock.
 */
#include "base/faults.h"
#include "base/entry_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RULES 128u

enum trigger { EVERY, NTH, FROM, EACH };
typedef struct rule {
    char function[64];
    enum trigger trigger;
    uint64_t number, calls, delay_ns;
    int result;
    bool missing;
} rule;

static _Atomic bool armed; /* there are rules */
static pthread_mutex_t rules_lock = PTHREAD_MUTEX_INITIALIZER;
static rule rules[MAX_RULES];
static uint32_t rule_count;

/* A rule for cuMemAlloc also applies to cuMemAlloc_v2; a rule for cuMemAlloc_v2 only to that. */
static bool matches(const char *pattern, const char *function)
{
    size_t length = strlen(pattern);
    if (strncmp(pattern, function, length) != 0)
        return false;
    return function[length] == '\0' ||
           (strncmp(function + length, "_v", 2) == 0 && function[length + 2] >= '0' && function[length + 2] <= '9');
}

static int add(const rule *wanted, const char *function)
{
    int result = -1;
    pthread_mutex_lock(&rules_lock);
    if (rule_count < MAX_RULES) {
        rules[rule_count] = *wanted;
        snprintf(rules[rule_count++].function, sizeof rules->function, "%s", function);
        /* Relaxed: a call concurrent with a new rule may precede it. */
        atomic_store_explicit(&armed, true, memory_order_relaxed);
        result = 0;
    }
    pthread_mutex_unlock(&rules_lock);
    return result;
}

CUresult nvs_sim_fault(const char *function)
{
    uint64_t delay_ns = 0;
    int result = CUDA_SUCCESS;
    if (!atomic_load_explicit(&armed, memory_order_relaxed))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&rules_lock);
    for (uint32_t i = 0; i < rule_count; i++) {
        rule *one = &rules[i];
        if (!matches(one->function, function))
            continue;
        one->calls++;
        bool hit = one->trigger == EVERY || (one->trigger == NTH && one->calls == one->number) ||
                   (one->trigger == FROM && one->calls >= one->number) ||
                   (one->trigger == EACH && one->calls % one->number == 0);
        if (!hit)
            continue;
        if (one->delay_ns != 0)
            delay_ns += one->delay_ns;
        else if (result == CUDA_SUCCESS)
            result = one->result;
    }
    pthread_mutex_unlock(&rules_lock);
    if (delay_ns != 0) {
        struct timespec pause = {.tv_sec = (time_t)(delay_ns / 1000000000u), .tv_nsec = (long)(delay_ns % 1000000000u)};
        nanosleep(&pause, NULL);
    }
    return (CUresult)result;
}

bool nvs_sim_is_missing(const char *function)
{
    bool missing = false;
    if (!atomic_load_explicit(&armed, memory_order_relaxed))
        return false;
    pthread_mutex_lock(&rules_lock);
    for (uint32_t i = 0; i < rule_count; i++)
        missing = missing || (rules[i].missing && matches(rules[i].function, function));
    pthread_mutex_unlock(&rules_lock);
    return missing;
}

/* N: the Nth call; N-: that and every later one; %K: every Kth; empty: every call. */
static bool parse_trigger(const char *when, rule *out)
{
    char *rest;
    if (*when == '\0')
        return true;
    out->trigger = *when == '%' ? EACH : NTH;
    out->number = strtoull(when + (*when == '%'), &rest, 10);
    if (out->trigger == NTH && *rest == '-') {
        out->trigger = FROM;
        rest++;
    }
    return *rest == '\0' && out->number != 0;
}

/* [slow:]FUNCTION[@WHEN]=NUMBER */
static bool parse_rule(const char *text, rule *out)
{
    char when[32] = "", *rest;
    const char *value = strrchr(text, '=');
    const bool slow = strncmp(text, "slow:", 5) == 0;
    memset(out, 0, sizeof *out);
    if (value == NULL)
        return false;
    text += slow ? 5 : 0;
    size_t length = strcspn(text, "@=");
    if (length == 0 || length >= sizeof out->function)
        return false;
    memcpy(out->function, text, length);
    if (text[length] == '@') {
        size_t size = (size_t)(value - (text + length + 1));
        if (size == 0 || size >= sizeof when)
            return false;
        memcpy(when, text + length + 1, size);
    }
    unsigned long long number = strtoull(value + 1, &rest, 10);
    if (rest == value + 1 || *rest != '\0' || !parse_trigger(when, out))
        return false;
    if (slow)
        out->delay_ns = number;
    else
        out->result = (int)number;
    return true;
}

void nvs_sim_faults_from_environment(void)
{
    static const char *const variables[] = {"NVSHARE_SIM_FAULTS", "NVSHARE_SIM_MISSING"};
    for (int which = 0; which < 2; which++) {
        const char *list = getenv(variables[which]);
        char copy[4096], *save = NULL;
        if (list == NULL)
            continue;
        snprintf(copy, sizeof copy, "%s", list);
        for (char *word = strtok_r(copy, ", ", &save); word != NULL; word = strtok_r(NULL, ", ", &save)) {
            rule one;
            if (which == 1)
                nvs_sim_missing(word);
            else if (!parse_rule(word, &one))
                nvs_sim_say("NVSHARE_SIM_FAULTS: '%s' is not [slow:]FUNCTION[@N|@N-|@%%K]=NUMBER; ignored", word);
            else
                add(&one, one.function);
        }
    }
}

SIM_EXPORT int nvs_sim_fail(const char *function, uint64_t nth, int result)
{
    rule one = {.trigger = nth == 0 ? EVERY : NTH, .number = nth, .result = result};
    return add(&one, function);
}

SIM_EXPORT int nvs_sim_missing(const char *function)
{
    rule one = {.trigger = EVERY, .result = CUDA_ERROR_NOT_FOUND, .missing = true};
    return add(&one, function);
}

SIM_EXPORT void nvs_sim_clear_faults(void)
{
    pthread_mutex_lock(&rules_lock);
    rule_count = 0;
    atomic_store_explicit(&armed, false, memory_order_relaxed);
    pthread_mutex_unlock(&rules_lock);
}

int nvs_sim_unsupported(const char *function)
{
    CUresult injected = nvs_sim_fault(function);
    return injected != CUDA_SUCCESS ? (int)injected : CUDA_ERROR_NOT_SUPPORTED;
}

static void (*_Atomic observer)(const char *function);

SIM_EXPORT void nvs_sim_observe(void (*call)(const char *function))
{
    atomic_store_explicit(&observer, call, memory_order_release); /* pairs with nvs_sim_observe_call */
}

void nvs_sim_observe_call(const char *function)
{
    /* Acquire: pairs with the release in nvs_sim_observe; what the observer uses is filled in. */
    void (*call)(const char *) = atomic_load_explicit(&observer, memory_order_acquire);
    if (call != NULL)
        call(function);
}
