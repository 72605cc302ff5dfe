/* What each message from the coordinator does, and what the begin and the end of a connection do.  Agent thread only.
 *
 * Non-goals: when the agent looks at its mailboxes (loop.c).
 */
#ifndef NVS_MESSAGES_H
#define NVS_MESSAGES_H

#include "coord/protocol/link.h"

extern const nvs_link_handlers nvs_message_handlers;
extern uint64_t nvs_awake_until_ns; /* on standby: the agent naps instead of sleeping, so that the grant finds a processor awake */

#endif
