/* The validity check of libcudart. */
#ifndef SIM_HANDSHAKE_H
#define SIM_HANDSHAKE_H

#include "device/device.h"

void nvs_sim_handshake(uint32_t version, uint64_t unix_seconds, const void *runtime_table, const void *check_table,
                       const void *check_function, uint8_t answer[16]);

#endif
