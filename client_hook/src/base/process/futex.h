/* A futex with an absolute CLOCK_MONOTONIC deadline. */
#ifndef NVS_FUTEX_H
#define NVS_FUTEX_H

#include <stdatomic.h>
#include <stdint.h>

void nvs_futex_wait(_Atomic uint32_t *word, uint32_t expected, uint64_t deadline_ns); /* UINT64_MAX: none.  May return early */
void nvs_futex_wake(_Atomic uint32_t *word, int threads);

#endif
