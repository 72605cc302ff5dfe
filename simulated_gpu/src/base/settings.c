/* State of the process that belongs to no object, and the settings, which the environment gives. */
#include "base/base.h"

#include <stdlib.h>

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

void nvs_sim_read_settings(void)
{
    const char *rate = getenv("NVSHARE_SIM_COPY_GIBPS");
    double gibps = rate != NULL && *rate != '\0' ? strtod(rate, NULL) : 20.0;
    nvs_sim_settings.driver_version = (int)number_from("NVSHARE_SIM_DRIVER_VERSION", 13000);
    nvs_sim_settings.kernel_ns = number_from("NVSHARE_SIM_KERNEL_NS", 20000);
    nvs_sim_settings.peers = number_from("NVSHARE_SIM_PEERS", 1) != 0;
    nvs_sim_settings.context_bytes = number_from("NVSHARE_SIM_CONTEXT_BYTES", 0);
    nvs_sim_settings.launch_queue = (uint32_t)number_from("NVSHARE_SIM_LAUNCH_QUEUE", 1024);
    nvs_sim_settings.copy_bytes_per_ns = gibps > 0 ? gibps * 1073741824.0 / 1e9 : 0;
}
