/* What the fuzzed programs share.  A failed MUST ends the process, which the fuzzer and the sanitizers report with the input. */
#ifndef NVS_FUZZ_H
#define NVS_FUZZ_H

#include "must.h"

#include <stddef.h>
#include <stdint.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#endif
