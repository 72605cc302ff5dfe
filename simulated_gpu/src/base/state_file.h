/* The state file that processes share: creation, lock, and the table of processes. */
#ifndef SIM_STATE_FILE_H
#define SIM_STATE_FILE_H

#include "base/base.h"

enum { SIM_UUID_TEXT = 48 }; /* bytes that nvs_sim_uuid_text needs */

nvs_sim_shared *nvs_sim_shared_open(void); /* NULL after a message */
nvs_sim_process *nvs_sim_shared_self(nvs_sim_shared *shared); /* the entry of this process; NULL: the table is full */
void nvs_sim_shared_lock(nvs_sim_shared *shared);
void nvs_sim_shared_unlock(nvs_sim_shared *shared);

/* With the shared lock. */
void nvs_sim_shared_reap(nvs_sim_shared *shared); /* drops the entries of dead processes */
uint64_t nvs_sim_shared_used(nvs_sim_shared *shared, uint32_t gpu);

nvs_sim_record *nvs_sim_shared_records(nvs_sim_shared *shared);
void nvs_sim_uuid_text(const uint8_t uuid[16], bool instance, char out[SIM_UUID_TEXT]);

#endif
