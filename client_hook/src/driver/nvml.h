/* NVML in a process under the hook: memory figures of the virtual card, in place of those of the real one.
 *
 * Which figures.  A GPU that this process computes on: what cuMemGetInfo says, by the same function of memory/memory.h.  Any other, and
 * every GPU of a process without CUDA (nvidia-smi): the limit of the environment, with nothing used; without one, the real
 * figures.  In lists of processes the entry of this one carries what it is charged with, those of others stay as they are.
 *
 * NVML is never loaded, started or called by us, but from inside a call of the application's.  Its types are declared here,
 * so that no nvml.h is needed; the sizes are part of its ABI.
 *
 * A list names processes as the PID namespace of the driver sees them; in a container with a namespace of its own ours is not
 * found there, and the list stays as it is.
 */
#ifndef NVS_NVML_H
#define NVS_NVML_H

#include "base/base.h"
#include "driver/cuda_api.h"

typedef void *nvs_nvml_device;

enum { /* nvmlReturn_t */
    NVS_NVML_SUCCESS = 0,
    NVS_NVML_LIBRARY_NOT_FOUND = 12,
    NVS_NVML_FUNCTION_NOT_FOUND = 13,
};

typedef struct nvs_nvml_memory {
    uint64_t total, free, used;
} nvs_nvml_memory;

typedef struct nvs_nvml_memory_v2 {
    uint32_t version;
    uint64_t total, reserved, free, used;
} nvs_nvml_memory_v2;

typedef struct nvs_nvml_process_v1 {
    uint32_t process_id;
    uint64_t used;
} nvs_nvml_process_v1;

typedef struct nvs_nvml_process { /* of _v2 and _v3 */
    uint32_t process_id;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
} nvs_nvml_process;

typedef struct nvs_nvml_detail {
    uint32_t process_id;
    uint64_t used;
    uint32_t gpu_instance, compute_instance;
    uint64_t used_protected;
} nvs_nvml_detail;

typedef struct nvs_nvml_detail_list {
    uint32_t version, mode, count;
    nvs_nvml_detail *entries;
} nvs_nvml_detail_list;

#define NVS_NVML_VERSIONED(type, number) ((uint32_t)(sizeof(type) | (uint32_t)(number) << 24))
_Static_assert(sizeof(nvs_nvml_memory) == 24, "nvmlMemory_t");
_Static_assert(NVS_NVML_VERSIONED(nvs_nvml_memory_v2, 2) == 0x02000028, "nvmlMemory_v2");
_Static_assert(sizeof(nvs_nvml_process_v1) == 16, "nvmlProcessInfo_v1_t");
_Static_assert(sizeof(nvs_nvml_process) == 24, "nvmlProcessInfo_v2_t, nvmlProcessInfo_t");
_Static_assert(sizeof(nvs_nvml_detail) == 32, "nvmlProcessDetail_v1_t");
_Static_assert(NVS_NVML_VERSIONED(nvs_nvml_detail_list, 1) == 0x01000018, "nvmlProcessDetailList_v1");

typedef enum nvs_nvml_id {
#define NVS_NVML(symbol, parameters, arguments, change) NVS_NVML_##symbol,
#include "driver/nvml_api.def"
    NVS_NVML_COUNT
} nvs_nvml_id;

nvs_nvml_id nvs_nvml_id_of_name(const char *name); /* NVS_NVML_COUNT when it is not one of ours */
void *nvs_nvml_wrapper(nvs_nvml_id id);            /* hooks/memory/nvml.c */

/* NVML's own function; NULL when the library is not loaded, or has none.  Leaves no trace in dlerror(). */
void *nvs_nvml_symbol(const char *name);
void *nvs_nvml_real(nvs_nvml_id id);
bool nvs_nvml_found(nvs_nvml_id id, void *handle); /* is it what this library and those that it is linked with find? */

/* After a call that succeeded: what the process shall see instead.  errno stays. */
void nvs_nvml_show_memory(nvs_nvml_device device, nvs_nvml_memory *memory);
void nvs_nvml_show_memory_v2(nvs_nvml_device device, nvs_nvml_memory_v2 *memory);
void nvs_nvml_show_processes_v1(nvs_nvml_device device, unsigned count, nvs_nvml_process_v1 *list);
void nvs_nvml_show_processes(nvs_nvml_device device, unsigned count, nvs_nvml_process *list);
void nvs_nvml_show_details(nvs_nvml_device device, nvs_nvml_detail_list *list);

#endif
