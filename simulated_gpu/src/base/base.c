/* Global state of the process, the settings from the environment, and messages.  Both simulated libraries link this. */
#include "base/base.h"

#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

pthread_mutex_t nvs_sim_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t nvs_sim_done = PTHREAD_COND_INITIALIZER;
sim_settings nvs_sim_settings = {.driver_version = 13000};
nvs_sim_shared *nvs_sim_shared_state;
uint64_t nvs_sim_next_id = 1;

static uint64_t number_from(const char *name, uint64_t fallback)
{
    const char *text = getenv(name);
    char *rest;
    if (text == NULL || *text == '\0')
        return fallback;
    unsigned long long value = strtoull(text, &rest, 0);
    if (*rest != '\0') {
        nvs_sim_say("%s=%s is not a number; using %llu", name, text, (unsigned long long)fallback);
        return fallback;
    }
    return value;
}

/* A part of `whole`, in millionths.  A value that is missing, not positive or too large counts as the whole. */
static uint32_t part_from(const char *name, double whole)
{
    const char *text = getenv(name);
    double part = text != NULL ? strtod(text, NULL) / whole : 1.0;
    return part >= 1e-6 && part < 1.0 ? (uint32_t)(part * SIM_WHOLE + 0.5) : SIM_WHOLE;
}

/* A file `control` in CUDA_MPS_PIPE_DIRECTORY stands for the control daemon; the variable has no default here. */
static bool control_daemon_runs(void)
{
    const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
    char path[4096];
    if (directory == NULL || *directory == '\0')
        return false;
    int length = snprintf(path, sizeof path, "%s/control", directory);
    return length > 0 && (size_t)length < sizeof path && access(path, F_OK) == 0;
}

void nvs_sim_read_settings(void)
{
    const char *rate = getenv("NVSHARE_SIM_COPY_GIBPS");
    double gibps = rate != NULL && *rate != '\0' ? strtod(rate, NULL) : 20.0;
    nvs_sim_settings.driver_version = (int)number_from("NVSHARE_SIM_DRIVER_VERSION", 13000);
    nvs_sim_settings.kernel_ns = number_from("NVSHARE_SIM_KERNEL_NS", 20000);
    nvs_sim_settings.peers = number_from("NVSHARE_SIM_PEERS", 1) != 0;
    nvs_sim_settings.context_bytes = number_from("NVSHARE_SIM_CONTEXT_BYTES", 0);
    nvs_sim_settings.launch_queue = (uint32_t)number_from("NVSHARE_SIM_LAUNCH_QUEUE", 1024);
    nvs_sim_settings.slices.length_ns = number_from("NVSHARE_SIM_SLICE_NS", 2000000);
    nvs_sim_settings.slices.switch_ns = number_from("NVSHARE_SIM_SWITCH_NS", 100000);
    nvs_sim_settings.demand = part_from("NVSHARE_SIM_DEMAND", 1.0);
    nvs_sim_settings.mps.client = control_daemon_runs();
    nvs_sim_settings.mps.priority = number_from("CUDA_MPS_CLIENT_PRIORITY", 0) != 0;
    nvs_sim_settings.mps.share = part_from("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100.0);
    nvs_sim_settings.copy_bytes_per_ns = gibps > 0 ? gibps * 1073741824.0 / 1e9 : 0;
}

void nvs_sim_say(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fputs("simulated GPU: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}

bool nvs_sim_start_thread(void *(*role)(void *), void *argument)
{
    pthread_t thread;
    sigset_t all, before;
    /* The application's own threads handle its signals. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const bool started = pthread_create(&thread, NULL, role, argument) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started)
        pthread_detach(thread);
    return started;
}
