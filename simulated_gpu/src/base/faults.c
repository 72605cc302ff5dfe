/* What tests put between a program and this driver: faults of calls, and an observer of calls.
 *
 * Faults come from NVSHARE_SIM_FAULTS and the C API of simulated_gpu.h.  Rules are appended one by one and dropped all at once.
 * They have their own lock, because a call is checked before it takes the driver's lock.
 */
#include "base/base.h"
#include "base/entry_table.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_RULES 128u

typedef struct rule {
    char function[64];
    uint64_t first, last, step; /* of the calls that it hits */
    uint64_t calls, delay_ns;
    int result;
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

static void add(const rule *wanted)
{
    pthread_mutex_lock(&rules_lock);
    if (rule_count < MAX_RULES) {
        rules[rule_count++] = *wanted;
        /* Relaxed: a call concurrent with a new rule may precede it. */
        atomic_store_explicit(&armed, true, memory_order_relaxed);
    } else {
        nvs_sim_say("more than %u faults; %s is ignored", MAX_RULES, wanted->function);
    }
    pthread_mutex_unlock(&rules_lock);
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
        if (one->calls < one->first || one->calls > one->last || (one->calls - one->first) % one->step != 0)
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

/* N: the Nth call; N-: that and every later one; %K: every Kth; empty: every call. */
static bool parse_calls(const char *when, rule *out)
{
    char *rest;
    *out = (rule){.first = 1, .last = UINT64_MAX, .step = 1};
    if (*when == '\0')
        return true;
    out->first = strtoull(when + (*when == '%'), &rest, 10);
    if (*when == '%')
        out->step = out->first;
    else if (*rest == '-')
        rest++;
    else
        out->last = out->first;
    return *rest == '\0' && out->first != 0;
}

/* [slow:]FUNCTION[@WHEN]=NUMBER */
static bool parse_rule(const char *text, rule *out)
{
    char when[32] = "", *rest;
    const char *value = strrchr(text, '=');
    const bool slow = strncmp(text, "slow:", 5) == 0;
    text += slow ? 5 : 0;
    const size_t length = strcspn(text, "@=");
    if (value == NULL || length == 0 || length >= sizeof out->function)
        return false;
    if (text[length] == '@') {
        const size_t size = (size_t)(value - (text + length + 1));
        if (size == 0 || size >= sizeof when)
            return false;
        memcpy(when, text + length + 1, size);
    }
    const unsigned long long number = strtoull(value + 1, &rest, 10);
    if (rest == value + 1 || *rest != '\0' || !parse_calls(when, out))
        return false;
    memcpy(out->function, text, length);
    if (slow)
        out->delay_ns = number;
    else
        out->result = (int)number;
    return true;
}

void nvs_sim_faults_from_environment(void)
{
    const char *list = getenv("NVSHARE_SIM_FAULTS");
    char copy[4096], *save = NULL;
    snprintf(copy, sizeof copy, "%s", list != NULL ? list : "");
    for (char *word = strtok_r(copy, ", ", &save); word != NULL; word = strtok_r(NULL, ", ", &save)) {
        rule one;
        if (parse_rule(word, &one))
            add(&one);
        else
            nvs_sim_say("NVSHARE_SIM_FAULTS: '%s' is not [slow:]FUNCTION[@N|@N-|@%%K]=NUMBER; ignored", word);
    }
}

SIM_EXPORT void nvs_sim_fail(const char *function, uint64_t nth, int result)
{
    rule one = {.first = nth != 0 ? nth : 1, .last = nth != 0 ? nth : UINT64_MAX, .step = 1, .result = result};
    snprintf(one.function, sizeof one.function, "%s", function);
    add(&one);
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
