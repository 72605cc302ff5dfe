/* What tests of the memory side say to the driver that stands in (memory_fake.c). */
#ifndef MEMORY_FAKE_H
#define MEMORY_FAKE_H

#include "memory/memory.h"

typedef struct fake_prefetch {
    uint64_t pointer, bytes;
    bool out;
} fake_prefetch;

extern fake_prefetch fake_prefetches[256];
extern unsigned fake_prefetch_count;
extern uint64_t fake_reserve_asked[64];
extern unsigned fake_reserves;
extern _Thread_local CUcontext fake_current;
extern _Thread_local bool fake_stream_captures;

void fake_fail(unsigned call, int result); /* the call-th inner call from now on fails; 0: none */
unsigned fake_calls(void);                 /* inner calls since then */
void fake_close_gate(void);
void fake_set_mode(int mode); /* nvs_settings.memory_mode */
void fake_set_short(bool shortly); /* some allocations in stream order go the short way where they may; and the context is asked for again */
uint32_t fake_short_left(void);     /* how many are still to go it, before the context is asked for again */
void fake_set_events_done(bool done);
void fake_set_capturing(bool capturing); /* for the calling thread */
void fake_set_context(uint64_t context); /* current in the calling thread; 0: none */
void fake_set_reserve_answer(int answer);
void fake_set_current_pool(uint64_t pool);
void fake_set_next_key(uint64_t key); /* where the next memory begins */
void fake_forget(uint64_t key);       /* memory ends, and nobody is told */
void fake_set_old_driver(bool old); /* without cuMemPrefetchAsync_v2 */
void fake_destroy_context(uint64_t context);
uint64_t fake_held(void); /* bytes that the driver really holds, each rounded as the quota rounds */

#endif
