/* The lock, the clock, the settings, messages, the state file, faults, and the marks of objects.
 *
 * nvs_sim_lock guards all state of the process.  A public function takes it once (entry.h); internal functions (nvs_sim_*)
 * expect that it is held.  It is dropped only while a thread sleeps, while an executor moves many bytes, and around callbacks.
 * Lock order: nvs_sim_lock, then the lock of the shared state file.
 */
#ifndef SIM_BASE_H
#define SIM_BASE_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL /* cuda.h then declares each version of a function under its exported name */
#endif
#include <cuda.h>

#include "simulated_gpu.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <time.h>

#define SIM_EXPORT __attribute__((visibility("default")))

enum { /* first word of each object; the memory of dead objects stays readable, to recognise stale handles */
    SIM_CONTEXT = 0x43585431,
    SIM_STREAM = 0x53545231,
    SIM_EVENT = 0x45564e31,
    SIM_MODULE = 0x4d4f4431,
    SIM_FUNCTION = 0x464e4331,
    SIM_GRAPH = 0x47525031,
    SIM_NODE = 0x4e4f4431,
    SIM_EXEC = 0x45584531,
    SIM_POOL = 0x504f4f31,
    SIM_ARRAY = 0x41525231,
    SIM_GREEN = 0x47524e31,
    SIM_PHYSICAL = 0x50485931,
    SIM_USER_OBJECT = 0x55534f31,
};

#define SIM_WHOLE 1000000u /* all multiprocessors, or full speed, in millionths */

typedef struct sim_slice_settings {
    uint64_t length_ns; /* 0: programs do not slow each other */
    uint64_t switch_ns; /* cost of a slice that ends before the work of its program */
} sim_slice_settings;

typedef struct sim_mps_settings {
    bool client;
    uint32_t priority; /* 0 normal, 1 below */
    uint32_t share;    /* the most that its kernels get, in millionths */
} sim_mps_settings;

typedef struct sim_settings {
    int driver_version;
    uint64_t kernel_ns;
    uint32_t demand;          /* millionths of the multiprocessors that a kernel wants */
    double copy_bytes_per_ns; /* 0: copies take no time */
    uint64_t context_bytes;
    uint32_t launch_queue;
    bool peers; /* GPUs can be given access to each other's memory */
    sim_slice_settings slices;
    sim_mps_settings mps;
} sim_settings;

extern pthread_mutex_t nvs_sim_lock;
extern pthread_cond_t nvs_sim_done; /* broadcast when operations have completed */
extern sim_settings nvs_sim_settings;
extern nvs_sim_shared *nvs_sim_shared_state;
extern uint64_t nvs_sim_next_id;

void nvs_sim_read_settings(void); /* from the environment */

bool nvs_sim_start_thread(void *(*role)(void *), void *argument); /* detached, without signals */

void nvs_sim_say(const char *format, ...) __attribute__((format(printf, 1, 2))); /* one line to stderr */

/* state_file.c */
enum { SIM_UUID_TEXT = 48 }; /* bytes that nvs_sim_uuid_text needs */
nvs_sim_shared *nvs_sim_shared_open(void); /* NULL after a message */
nvs_sim_process *nvs_sim_shared_self(nvs_sim_shared *shared); /* the entry of this process; NULL: the table is full */
void nvs_sim_shared_lock(nvs_sim_shared *shared);
void nvs_sim_shared_unlock(nvs_sim_shared *shared);
void nvs_sim_shared_reap(nvs_sim_shared *shared);                    /* with the lock: drops the entries of dead processes */
bool nvs_sim_shared_names(uint32_t id, const nvs_sim_process *process); /* whether that is the process with this id in our PID namespace */
uint64_t nvs_sim_shared_used(nvs_sim_shared *shared, uint32_t gpu); /* with the lock */
nvs_sim_record *nvs_sim_shared_records(nvs_sim_shared *shared);
void nvs_sim_uuid_text(const uint8_t uuid[16], bool instance, char out[SIM_UUID_TEXT]);

/* faults.c */
CUresult nvs_sim_fault(const char *function); /* counts the call, delays it if a rule says so, and returns the result of a rule */
void nvs_sim_faults_from_environment(void);
void nvs_sim_observe_call(const char *function);

static inline uint64_t nvs_sim_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

#endif
