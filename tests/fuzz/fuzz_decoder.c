/* The messages between hook and coordinator: any bytes are a message or are refused, and a message survives being sent on.
 *
 * test_to_coordinator and test_to_client decode a frame and encode it again (tests/unit/protocol/codec.py makes them).
 */
#include "fuzz.h"

typedef int decode(const uint8_t *, size_t, uint8_t *, size_t, size_t *);
int test_to_coordinator(const uint8_t *frame, size_t size, uint8_t *out, size_t capacity, size_t *written);
int test_to_client(const uint8_t *frame, size_t size, uint8_t *out, size_t capacity, size_t *written);

static void survives(decode *again, const uint8_t *frame, size_t size)
{
    uint8_t once[2048], twice[2048];
    size_t first = 0, second = 0;
    if (again(frame, size, once, sizeof once, &first) != 0)
        return;
    MUST(first > 0 && again(once, first, twice, sizeof twice, &second) == 0);
    MUST(first == second && memcmp(once, twice, first) == 0);
    for (size_t room = 0; room < first; room++) { /* too little: refused, and nothing is written beyond it */
        size_t none = 0;
        again(frame, size, twice + sizeof twice - room, room, &none);
        MUST(none == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    survives(test_to_coordinator, data, size);
    survives(test_to_client, data, size);
    return 0;
}
