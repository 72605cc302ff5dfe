/* One line on standard error for a wait that lasts, and one at its end.  Agent thread only.
 *
 * After 5 s the agent asks the coordinator what the program waits for, and prints the answer.  A program that often waits
 * long gets such lines at most once a minute.
 *
 * Non-goals: a coordinator that does not answer (loop.c says so).
 */
#ifndef NVS_NOTICE_H
#define NVS_NOTICE_H

#include "coord/protocol/wire.gen.h"

void nvs_notice_start(void);
/* `asked`: the coordinator has this client's request.  Returns when to serve again; UINT64_MAX: no deadline. */
uint64_t nvs_notice_serve(uint32_t gpu, bool asked, uint64_t now);
void nvs_notice_explained(const nvs_wait_explained *answer);
void nvs_notice_lost(void); /* the connection: the question is open again */

#endif
