/* The simulated libnvidia-ml.so.1: results and handles.
 *
 * As in the real library, NVML numbers cards, and CUDA_VISIBLE_DEVICES has no effect.  A handle points into one of two fixed arrays:
 * whole cards, and MIG instances.
 */
#ifndef SIM_NVML_H
#define SIM_NVML_H

#include "base/state_file.h"

typedef enum nvml_result {
    NVML_SUCCESS = 0,
    NVML_UNINITIALIZED = 1,
    NVML_INVALID_ARGUMENT = 2,
    NVML_NOT_SUPPORTED = 3,
    NVML_NOT_FOUND = 6,
    NVML_INSUFFICIENT_SIZE = 7,
    NVML_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_UNKNOWN = 999,
} nvml_result;

typedef struct nvml_device {
    uint32_t card, instance; /* instance 0: the whole card */
    bool present;
    uint64_t last_busy_ns, last_asked_ns;
} nvml_device;

extern nvs_sim_shared *nvs_nvml_shared;
extern pthread_mutex_t nvs_nvml_lock; /* guards last_busy_ns and last_asked_ns of the handles, and the count of users */
extern nvml_device nvs_nvml_cards[NVS_SIM_MAX_GPUS], nvs_nvml_instances[NVS_SIM_MAX_GPUS];
extern uint32_t nvs_nvml_card_count;

bool nvs_nvml_ready(void);
bool nvs_nvml_valid(const nvml_device *device);
bool nvs_nvml_covers(const nvml_device *device, uint32_t gpu); /* the GPU of the shared file is the device, or an instance of it */
nvml_result nvs_nvml_put(char *out, unsigned room, const char *text);

#define REQUIRE(condition)                                                                      \
    do {                                                                                        \
        if (!nvs_nvml_ready())                                                                  \
            return NVML_UNINITIALIZED;                                                          \
        if (!(condition))                                                                       \
            return NVML_INVALID_ARGUMENT;                                                       \
    } while (0)

/* A function that returns one value of a device. */
#define GETTER(name, type, condition, value)                                                    \
    SIM_EXPORT nvml_result name(nvml_device *device, type *out)                                 \
    {                                                                                           \
        REQUIRE(nvs_nvml_valid(device) && (condition) && out != NULL);                          \
        *out = value;                                                                           \
        return NVML_SUCCESS;                                                                    \
    }

#endif
