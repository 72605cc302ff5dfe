/* Handlers of the coordinator's messages, and of the begin and end of a connection.  Agent thread only.
 *
 * Non-goals: the mailboxes (loop.c).
 */
#ifndef NVS_MESSAGES_H
#define NVS_MESSAGES_H

#include "coord/protocol/link.h"

extern const nvs_link_handlers nvs_message_handlers;
extern uint64_t nvs_awake_until_ns; /* on standby: the agent naps, so that a processor is awake for the grant */

#endif
