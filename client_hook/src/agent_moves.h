/* Orders to move memory, carried out on the agent thread while the gate is closed.
 *
 * May not go here: when memory may move (agent_loop.c), and how it does (memory.h).
 */
#ifndef NVS_AGENT_MOVES_H
#define NVS_AGENT_MOVES_H

#include "base.h"

typedef struct nvs_moved {
    uint64_t bytes;
    uint64_t elapsed_ns;
    uint32_t error; /* CUresult; 0: none */
} nvs_moved;

/* Nobody holds the lease.  Tells the coordinator of its progress, but not of its end. */
nvs_moved nvs_agent_move(uint32_t gpu, uint64_t order_id, uint64_t bytes, bool out);

#endif
