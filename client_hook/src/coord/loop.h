/* The agent thread. */
#ifndef NVS_LOOP_H
#define NVS_LOOP_H

void *nvs_agent_main(void *nothing);

#endif
