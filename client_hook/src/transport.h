/* libzmq, loaded late and by path, and nothing else: one DEALER to the coordinator and its monitor.
 *
 * Used by the agent thread alone, except for nvs_transport_load (the thread that starts the agent, which may hold the
 * loader's lock already) and nvs_transport_abandon (the child of a fork).
 *
 * May not go here: messages, leases, timers.
 */
#ifndef NVS_TRANSPORT_H
#define NVS_TRANSPORT_H

#include "base.h"

typedef enum nvs_transport_event {
    NVS_TRANSPORT_NOTHING = 0,
    NVS_TRANSPORT_CONNECTED, /* the peer's end is there */
    NVS_TRANSPORT_LOST,      /* close, wait a little, connect again */
    NVS_TRANSPORT_FRAME,     /* a frame of *size bytes; larger than the buffer when it was cut */
} nvs_transport_event;

/* Loads libzmq: `path`, or the system's when it is empty.  The reason of a failure is logged. */
nvs_status nvs_transport_load(const char *path);

nvs_status nvs_transport_connect(const char *socket_path);
void nvs_transport_close(void);

/* Never blocks.  False: it cannot be sent now (no peer, or its queue is full). */
bool nvs_transport_send(const uint8_t *frame, size_t size);

/* Never blocks.  Call until NOTHING before sleeping on the descriptors, for those only tell of changes. */
nvs_transport_event nvs_transport_next(uint8_t *frame, size_t capacity, size_t *size);

/* At most two descriptors to poll for POLLIN; returns how many. */
unsigned nvs_transport_descriptors(int out[2]);

/* For the end of the process: what was sent last has so long to leave. */
void nvs_transport_finish(int linger_ms);

/* In the child of a fork: forgets everything, and closes the child's copy of the connection. */
void nvs_transport_abandon(void);

#endif
