/* The thread that serves this process's exports to importers.
 *
 * It starts with the first export and sleeps between requests.  Each importing process has one connection; the end of a connection closes the
 * exports that were open on it, also when the importer was killed.
 *
 * The thread calls the driver to make descriptors, and to free memory that it was the last holder of, until the process begins to exit.
 *
 * Non-goals: the choice of exported memory (export.c).
 */
#ifndef NVS_IPC_SERVER_H
#define NVS_IPC_SERVER_H

#include "ipc/socket.h"

typedef struct nvs_ipc_export_entry nvs_ipc_export_entry;

typedef struct nvs_ipc_exports { /* the exports that the server looks up */
    nvs_ipc_export_entry *(*hold)(const nvs_ipc_secret *key); /* valid until `unref`; NULL: unknown key, or freed memory */
    void (*unref)(nvs_ipc_export_entry *held);
    void (*answer)(const nvs_ipc_export_entry *held, uint32_t first, nvs_ipc_answer *out, int *descriptors);
} nvs_ipc_exports;

/* The name of this process's socket; the first call starts the server.  False: it cannot start. */
bool nvs_ipc_serve(const nvs_ipc_exports *exports, nvs_ipc_secret *process);
bool nvs_ipc_is_own(const nvs_ipc_secret *process);
void nvs_ipc_server_after_fork(void);

#endif
