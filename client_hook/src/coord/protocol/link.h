/* The agent's connection: connecting, noticing the loss, connecting again; and hello.  Agent thread only.
 *
 * Non-goals: what a message about a GPU means.
 */
#ifndef NVS_AGENT_LINK_H
#define NVS_AGENT_LINK_H

#include "base/base.h"
#include "coord/protocol/wire.gen.h"

typedef struct nvs_link_handlers {
    void (*connected)(void); /* hello is sent; say what the coordinator must know */
    void (*lost)(void);      /* after `connected`: everything said on that connection is void */
    void (*frame)(const uint8_t *frame, size_t size);
} nvs_link_handlers;

void nvs_link_start(void);
void nvs_link_serve(const nvs_link_handlers *handlers); /* connects if due, takes what came; never blocks */
bool nvs_link_up(void);
void nvs_link_send(const uint8_t *frame, size_t size); /* nothing without a connection */
void nvs_link_fail(void);                              /* the peer broke the protocol, or we must begin anew */
void nvs_link_refused(void);                           /* it does not want us: try again, but slowly */
uint64_t nvs_link_due(void);                           /* when to serve although nothing came; UINT64_MAX: never */
bool nvs_link_restless(void);                          /* serve again before sleeping */
int nvs_link_descriptor(short *events);                /* to poll, and for what; -1: nothing to poll */

#define NVS_LINK_SEND(kind, ...)                                                     \
    do {                                                                             \
        uint8_t frame_[NVS_MAX_FRAME_BYTES];                                         \
        nvs_##kind message_ = {__VA_ARGS__};                                         \
        nvs_link_send(frame_, nvs_encode_##kind(&message_, frame_, sizeof frame_));  \
    } while (0)

#endif
