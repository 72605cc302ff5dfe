/* The protocol of exporter and importer: handles, messages, and the socket that carries messages and descriptors.
 *
 * The socket has an abstract name.  It ends with its process, even a killed one, and belongs to one network namespace: containers of one pod can
 * connect, containers of different networks cannot.  The name is random and known only to holders of a handle, so no other process can take it
 * first.
 *
 * Non-goals: CUDA calls; the effect of a message.
 */
#ifndef NVS_IPC_SOCKET_H
#define NVS_IPC_SOCKET_H

#include "base/base.h"

#include <sys/types.h>

#define NVS_IPC_VERSION 1u /* of handles and messages */
#define NVS_IPC_TIMEOUT_NS 2000000000u
#define NVS_IPC_CHUNKS 32u /* in one answer; the kernel passes that many descriptors in a message, and most exports have fewer chunks */

/* The exporter has ended or has freed the memory; the driver's code for this. */
#define NVS_IPC_STALE CUDA_ERROR_INVALID_HANDLE

typedef struct nvs_ipc_secret {
    uint8_t bytes[16];
} nvs_ipc_secret;

/* The content of a CUipcMemHandle of ours. */
typedef struct nvs_ipc_handle {
    char magic[8];
    uint32_t version;
    int32_t process_id;     /* for log messages */
    nvs_ipc_secret process; /* names the exporter's socket */
    nvs_ipc_secret key;     /* of this export */
    uint64_t length;        /* of the allocation */
    uint64_t reserved;
} nvs_ipc_handle;
_Static_assert(sizeof(nvs_ipc_handle) == sizeof(CUipcMemHandle), "the size is CUDA's");

enum { NVS_IPC_OPEN = 1, NVS_IPC_CLOSE = 2 };

typedef struct nvs_ipc_request {
    uint32_t version, what;
    uint32_t number; /* repeated in the answer, to recognise a late one */
    uint32_t first;  /* first chunk wanted; a request for chunk 0 opens the export */
    nvs_ipc_secret key;
} nvs_ipc_request;

typedef struct nvs_ipc_answer { /* to NVS_IPC_OPEN, with a descriptor for each of its chunks */
    uint32_t number;
    int32_t result; /* a CUresult */
    uint32_t chunks, here; /* of the export, and in this answer */
    uint64_t total_bytes;  /* of all chunks */
    uint64_t offset, length; /* the allocation within them */
    uint64_t bytes[NVS_IPC_CHUNKS];
} nvs_ipc_answer;

bool nvs_ipc_make_secret(nvs_ipc_secret *out);
bool nvs_ipc_same(const nvs_ipc_secret *a, const nvs_ipc_secret *b);
/* Sockets are non-blocking, close-on-exec, and numbered above the application's descriptors.  -1: failed. */
int nvs_ipc_listen(const nvs_ipc_secret *process);
int nvs_ipc_accept(int listener, bool *wait); /* `wait`: no descriptors are free, and the next call would fail, too */
int nvs_ipc_connect(const nvs_ipc_secret *process, uint64_t deadline_ns);
/* Sends or receives one whole message before the deadline. */
bool nvs_ipc_send(int socket, const void *message, size_t bytes, const int *descriptors, uint32_t count, uint64_t deadline_ns);
/* Returns the message's size; 0: the peer has closed; -1: the deadline has passed, or there were too many descriptors.  The caller owns the
 * descriptors. */
ssize_t nvs_ipc_receive(int socket, void *message, size_t room, int *descriptors, uint32_t most, uint32_t *count, uint64_t deadline_ns);
void nvs_ipc_close_all(const int *descriptors, uint32_t count);

#endif
