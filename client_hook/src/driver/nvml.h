/* NVML's functions that the hook wraps (nvml_api.def), its types, and the real functions.
 *
 * The hook never loads or starts NVML, and calls it only inside a call of the application.  Its types are declared here,
 * so that no nvml.h is needed; the sizes are part of its ABI.
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

nvs_nvml_id nvs_nvml_id_of_name(const char *name); /* NVS_NVML_COUNT: not wrapped */
extern void *(*const nvs_nvml_wrapper)(nvs_nvml_id id) __attribute__((visibility("hidden"))); /* init.c */

/* NVML's own function; NULL: not loaded, or it has none.  Leaves no trace in dlerror(). */
void *nvs_nvml_symbol(const char *name);
void *nvs_nvml_real(nvs_nvml_id id);
bool nvs_nvml_found(nvs_nvml_id id, void *handle); /* true: a look-up in this library finds NVML's own function */

#endif
