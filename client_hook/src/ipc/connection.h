/* Connections to exporters, one for each process, shared by the imports from it.
 *
 * Non-goals: mapping the chunks.
 */
#ifndef NVS_IPC_CONNECTION_H
#define NVS_IPC_CONNECTION_H

#include "ipc/socket.h"

typedef struct nvs_ipc_connection nvs_ipc_connection;

/* The connection to a process, with one more user.  The first request connects it.  NULL: no memory. */
nvs_ipc_connection *nvs_ipc_connection_to(const nvs_ipc_secret *process);
void nvs_ipc_connection_unref(nvs_ipc_connection *of);
/* Fetches the chunks of an export from `first` on, as many as fit an answer.  The caller owns the descriptors. */
CUresult nvs_ipc_fetch(nvs_ipc_connection *of, const nvs_ipc_secret *key, uint32_t first, nvs_ipc_answer *out, int *descriptors, uint64_t deadline_ns);
void nvs_ipc_notify_closed(nvs_ipc_connection *of, const nvs_ipc_secret *key);
void nvs_ipc_connections_after_fork(void);

#endif
