/* Memory of mode `swap` shared with other processes as cuIpcGetMemHandle does, which the driver offers for its own memory only.
 *
 * The exporter pins the chunks that hold the allocation and answers for them at a socket (server.c); the handle names that socket
 * and holds a key that cannot be guessed.  The importer, in whatever mode it runs, gets a descriptor for each chunk and maps them in a row
 * (import.c).  As long as it has them mapped it keeps a connection, so that the exporter counts as pinned what others hold, also after
 * the program has freed it.
 *
 * Invariants:
 *  - nothing runs and no socket is open in a process that neither exports nor has imported;
 *  - a descriptor goes only to a process of the same user (by what the kernel says) that knows the key;
 *  - what others have mapped is on the GPU, and counted as pinned by who made it, until they have closed it or died;
 *  - no call of an application waits for another process for longer than NVS_IPC_PATIENCE_NS, and a tenth to say that it gives up.
 *
 * Threads: the tables of exports and of imports have a lock each, under which nothing else is done: no lock below is taken, no driver
 * called, nothing waited for.
 */
#ifndef NVS_IPC_H
#define NVS_IPC_H

#include "base/base.h"
#include "memory/records/allocation.h"

#include <sys/types.h>

#define NVS_IPC_VERSION 1u /* of handles and messages */
#define NVS_IPC_PATIENCE_NS 2000000000u
#define NVS_IPC_CHUNKS 32u /* of one answer: what the kernel passes in one message, and more than most exports have */

/* What the driver says in these cases. */
#define NVS_IPC_STALE CUDA_ERROR_INVALID_HANDLE /* whoever exported it is gone, or has freed it */
#define NVS_IPC_OWN CUDA_ERROR_INVALID_CONTEXT  /* opened in the process that exported it */

typedef struct nvs_ipc_secret {
    uint8_t bytes[16];
} nvs_ipc_secret;

/* What is in a CUipcMemHandle of ours. */
typedef struct nvs_ipc_handle {
    char magic[8];
    uint32_t version;
    int32_t process_id;     /* to be read by people */
    nvs_ipc_secret process; /* names the exporter's socket */
    nvs_ipc_secret key;     /* of this export */
    uint64_t length;        /* of the allocation */
    uint64_t reserved;
} nvs_ipc_handle;
_Static_assert(sizeof(nvs_ipc_handle) == sizeof(CUipcMemHandle), "the size is CUDA's");

/* --- socket.c: bytes and descriptors between two processes of one user; no CUDA --- */

enum { NVS_IPC_OPEN = 1, NVS_IPC_CLOSE = 2 };

typedef struct nvs_ipc_request {
    uint32_t version, what;
    uint32_t number; /* comes back in the answer, so that one that came too late is known */
    uint32_t first;  /* chunk; the whole is open once the first was asked for */
    nvs_ipc_secret key;
} nvs_ipc_request;

typedef struct nvs_ipc_answer { /* to NVS_IPC_OPEN, with a descriptor for each of its chunks */
    uint32_t number;
    int32_t result; /* a CUresult */
    uint32_t chunks, here; /* in all, and in this answer */
    uint64_t total_bytes;  /* of all chunks */
    uint64_t offset, length; /* the allocation within them */
    uint64_t bytes[NVS_IPC_CHUNKS];
} nvs_ipc_answer;

bool nvs_ipc_make_secret(nvs_ipc_secret *out);
bool nvs_ipc_same(const nvs_ipc_secret *a, const nvs_ipc_secret *b);
/* All sockets are non-blocking, closed at exec, and numbered out of the application's way.  -1: there is none. */
int nvs_ipc_listen(const nvs_ipc_secret *process);
int nvs_ipc_accept(int listener, bool *wait); /* `wait`: it is for want of descriptors, and will be so again at once */
int nvs_ipc_connect(const nvs_ipc_secret *process, uint64_t deadline_ns);
/* Whole messages; until the deadline. */
bool nvs_ipc_send(int socket, const void *message, size_t bytes, const int *descriptors, uint32_t count, uint64_t deadline_ns);
/* Its size; 0: the other end is closed; -1: nothing came in time, or not all descriptors found a place here.  The descriptors are the
 * caller's. */
ssize_t nvs_ipc_receive(int socket, void *message, size_t room, int *descriptors, uint32_t most, uint32_t *count, uint64_t deadline_ns);
void nvs_ipc_close_all(const int *descriptors, uint32_t count);

/* --- export.c --- */

bool nvs_ipc_is_ours(const CUipcMemHandle *handle);

/* A handle for the allocation, which is the registry's copy of an entry in chunks.  Waits for the lease, unless there is a handle. */
CUresult nvs_ipc_export(const nvs_allocation *allocation, nvs_ipc_handle *out);
/* What began at this address is freed: its handle is void.  Cheap where nothing was exported. */
void nvs_ipc_withdraw(uint32_t gpu, CUdeviceptr address);

/* For the server: what is exported under a key, which then lasts until nvs_ipc_unref.  NULL: nothing, or not any more. */
typedef struct nvs_ipc_export_entry nvs_ipc_export_entry;
nvs_ipc_export_entry *nvs_ipc_hold(const nvs_ipc_secret *key);
void nvs_ipc_unref(nvs_ipc_export_entry *held);
void nvs_ipc_answer_open(const nvs_ipc_export_entry *held, uint32_t first, nvs_ipc_answer *out, int *descriptors);

/* --- server.c --- */

/* Starts it the first time.  False: there can be none. */
bool nvs_ipc_serve(nvs_ipc_secret *process);
bool nvs_ipc_is_own(const nvs_ipc_secret *process);

/* --- import.c --- */
CUresult nvs_ipc_open(const nvs_ipc_handle *handle, CUdeviceptr *out);
bool nvs_ipc_close(CUdeviceptr address, CUresult *result); /* false: it is none of ours */
void nvs_ipc_context_gone(CUcontext context);

typedef struct nvs_ipc_import {
    CUdeviceptr address;
    uint64_t length, serial;
    CUcontext context;
    uint32_t gpu;
} nvs_ipc_import;
bool nvs_ipc_imported(CUdeviceptr pointer, nvs_ipc_import *out);
/* --- reach.c --- */
/* Work of this GPU is going to use memory that may be such: then it gets rights to it.  False: it cannot. */
bool nvs_ipc_reach(CUdeviceptr pointer, uint32_t gpu);
/* A GPU has peer access to another one: to all that this one has open, now and later. */
void nvs_ipc_open_to(uint32_t owner, uint32_t accessor);
bool nvs_ipc_has_access(uint32_t owner, uint32_t accessor);
bool nvs_ipc_give(CUdeviceptr base, uint64_t bytes, uint32_t gpu); /* cuMemSetAccess */
/* One that holds this address (0: any that `owner` has open) and that another GPU has not been let into; and that it has. */
bool nvs_ipc_find_closed(CUdeviceptr pointer, uint32_t owner, uint32_t gpu, CUdeviceptr *base, uint64_t *bytes);
void nvs_ipc_note_open(CUdeviceptr base, uint32_t gpu);

/* What the driver would say of such memory if it were one allocation; false: as it says anyhow.  hooks/memory/ipc.c */
bool nvs_ipc_pointer_answer(const nvs_ipc_import *as, void *data, CUpointer_attribute attribute);

/* Once, before the first export or import: what a forked child must forget. */
void nvs_ipc_prepare(void);
void nvs_ipc_server_after_fork(void);
void nvs_ipc_exports_after_fork(void);
void nvs_ipc_imports_after_fork(void);

#endif
