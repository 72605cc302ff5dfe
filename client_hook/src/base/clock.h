/* The time.  Every deadline of the hook is on this clock. */
#ifndef NVS_CLOCK_H
#define NVS_CLOCK_H

#include <stdint.h>

uint64_t nvs_now_ns(void); /* CLOCK_MONOTONIC */

#endif
