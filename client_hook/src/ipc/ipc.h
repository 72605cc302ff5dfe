/* Legacy IPC (cuIpcGetMemHandle) for memory of mode `swap`; the driver offers it only for its own allocations.
 *
 * The exporter pins the chunks that hold the allocation and serves them at a socket (export.c).  A handle names that socket and holds a
 * random key.  The importer, in any memory mode, receives a descriptor for each chunk and maps the chunks at contiguous addresses (import.c).
 * Its connection stays open while they are mapped, so that the exporter counts mapped memory as pinned, even after the program has freed it.
 *
 * Invariants:
 *  - a process that neither exports nor imports has no thread and no socket of this folder;
 *  - only a process of the same user (SO_PEERCRED) that knows the key receives a descriptor;
 *  - memory that importers have mapped is on the GPU, and its exporter counts it as pinned, until they have closed it or ended;
 *  - a call of the application waits for another process for at most NVS_IPC_TIMEOUT_NS, plus a tenth to report that it gives up.
 *
 * Exports, imports and connections have one lock each.  A thread that holds one takes no other lock, calls no driver and does not wait.  The exporter's
 * thread has another one while it calls the driver; an exiting thread waits for it.
 */
#ifndef NVS_IPC_H
#define NVS_IPC_H

#include "base/base.h"
#include "ipc/socket.h"
#include "memory/registry.h"

/* --- export.c --- */

bool nvs_ipc_is_ours(const CUipcMemHandle *handle);
/* A handle for an allocation in chunks, given as the registry's copy.  The first call for an allocation waits for the lease. */
CUresult nvs_ipc_export(const nvs_allocation *allocation, CUipcMemHandle *out);
/* The allocation that began at this address is freed, and its handle becomes invalid.  Cheap in a process without exports. */
void nvs_ipc_withdraw(uint32_t gpu, CUdeviceptr address);
bool nvs_ipc_is_own(const nvs_ipc_secret *process); /* the name of this process's socket */
void nvs_ipc_exports_after_fork(void);

/* --- import.c --- */

typedef struct nvs_ipc_import {
    CUdeviceptr address;
    uint64_t length, serial;
    CUcontext context;
    uint32_t gpu;
} nvs_ipc_import;

CUresult nvs_ipc_open(const CUipcMemHandle *from, CUdeviceptr *out);
bool nvs_ipc_close(CUdeviceptr address, CUresult *result); /* false: not such an import */
void nvs_ipc_context_gone(CUcontext context);
bool nvs_ipc_imported(CUdeviceptr pointer, nvs_ipc_import *out);
/* Before work of a GPU on a pointer: gives the GPU access to the import that contains it.  False: the driver refuses. */
bool nvs_ipc_allow(CUdeviceptr pointer, uint32_t gpu);
/* A GPU has been given peer access to `owner`: it gets access to all imports of that GPU, present and future. */
void nvs_ipc_enable_peer(uint32_t owner, uint32_t accessor);
void nvs_ipc_imports_after_fork(void);

#endif
