/* The chunks of one export, mapped at contiguous addresses in this process.
 *
 * Non-goals: the users of a mapping, and its lifetime (import.c).
 */
#ifndef NVS_IPC_MAPPING_H
#define NVS_IPC_MAPPING_H

#include "ipc/connection.h"

typedef struct nvs_ipc_mapping {
    CUdeviceptr base;
    uint64_t bytes;      /* of all chunks */
    uint64_t mapped;     /* bytes mapped, from the base on */
    CUdeviceptr address; /* of the allocation */
    uint64_t length;
} nvs_ipc_mapping;

/* Maps an export with access for a GPU.  After a failure, too, nvs_ipc_unmap removes the mapping. */
CUresult nvs_ipc_map(nvs_ipc_connection *from, const nvs_ipc_secret *key, uint32_t gpu, uint64_t deadline_ns, nvs_ipc_mapping *out);
void nvs_ipc_unmap(nvs_ipc_mapping *mapping);
CUresult nvs_ipc_give_access(CUdeviceptr base, uint64_t bytes, uint32_t gpu);

#endif
