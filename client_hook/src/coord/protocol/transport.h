/* The connection to the coordinator: ZeroMQ's protocol (ZMTP 3.1) as a DEALER, over a Unix socket, without libzmq.
 *
 * Used by the agent thread alone, except for nvs_transport_abandon (the child of a fork).
 *
 * Non-goals: messages, leases, timers, connecting again.
 */
#ifndef NVS_TRANSPORT_H
#define NVS_TRANSPORT_H

#include "base/base.h"

typedef enum nvs_transport_event {
    NVS_TRANSPORT_NOTHING = 0,
    NVS_TRANSPORT_CONNECTED, /* both ends have shaken hands */
    NVS_TRANSPORT_LOST,      /* or not established: close, pause, connect again */
    NVS_TRANSPORT_FRAME,     /* a frame of *size bytes; larger than the buffer when it was cut */
} nvs_transport_event;

/* UNAVAILABLE: the path cannot be one, or the process has no descriptor left; the reason is logged.  That nobody listens
 * is no failure: nvs_transport_next() says LOST.  A listener of another user than root, this program's own, the owner of a
 * directory that root has made, or `coordinator_user` (-1: none) is not talked to: UNAVAILABLE. */
nvs_status nvs_transport_connect(const char *socket_path, int32_t coordinator_user);
int nvs_transport_connect_error(void); /* errno of the last attempt; 0: a peer listened */
void nvs_transport_close(void);
bool nvs_transport_own(void); /* false: not connected, or the program has closed the descriptor */

/* Never blocks.  False: it cannot be sent now (no peer, or its queue is full). */
bool nvs_transport_send(const uint8_t *frame, size_t size);

/* Never blocks. */
nvs_transport_event nvs_transport_next(uint8_t *frame, size_t capacity, size_t *size);

/* The descriptor to poll, and for what; -1 without a connection. */
int nvs_transport_descriptor(short *events);

/* At the end of the process: waits so long for queued frames, and closes. */
void nvs_transport_finish(int linger_ms);

/* In the child of a fork: closes the child's copy of the connection. */
void nvs_transport_abandon(void);

#endif
