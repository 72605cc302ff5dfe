/* The agent's connection: connecting, noticing the loss, connecting again; and hello.  Agent thread only, except nvs_transport_abandon.
 *
 * Non-goals: what a message about a GPU means.
 */
#ifndef NVS_LINK_H
#define NVS_LINK_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

typedef struct nvs_link_handlers {
    void (*connected)(void); /* hello is sent; send the state */
    void (*lost)(void);      /* after `connected`: messages on that connection count no more */
    void (*frame)(const uint8_t *frame, size_t size);
} nvs_link_handlers;

void nvs_link_start(void);
void nvs_link_serve(const nvs_link_handlers *handlers); /* connects if due, and receives; never blocks */
bool nvs_link_up(void);
void nvs_link_send(const uint8_t *frame, size_t size); /* no effect without a connection */
void nvs_link_fail(void);                              /* ends the connection: the peer broke the protocol */
void nvs_link_refused(void);                           /* the coordinator refuses this program: retries are slow */
uint64_t nvs_link_due(void);                           /* the next time to serve; UINT64_MAX: none */
bool nvs_link_has_more(void);                          /* serve again before sleeping */
int nvs_link_descriptor(short *events);                /* to poll; -1: none */

#define NVS_LINK_SEND(kind, ...)                                                     \
    do {                                                                             \
        uint8_t frame_[NVS_MAX_FRAME_BYTES];                                         \
        nvs_##kind message_ = {__VA_ARGS__};                                         \
        nvs_link_send(frame_, nvs_encode_##kind(&message_, frame_, sizeof frame_));  \
    } while (0)

int nvs_transport_connect_error(void); /* errno of the last attempt; 0: a peer listened */

/* At the end of the process: waits so long for queued frames, and closes. */
void nvs_transport_finish(int linger_ms);

/* In the child of a fork: closes the child's copy of the connection. */
void nvs_transport_abandon(void);

#endif
