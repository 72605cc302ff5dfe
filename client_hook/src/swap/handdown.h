/* Physical memory that goes from a program that is evicted straight to the one that is restored, without the driver's seeing it freed.
 *
 * Why: what is freed the driver wipes, with the engine that the other program's copies need: on an H200 the copies of a hand-over
 * reach 78 GiB/s together with it and 90 without (docs/decisions.md).
 *
 * How: the one that is evicted exports a chunk as a descriptor and sends it to the other's socket; no other process takes part.  The
 * coordinator tells both ends two random numbers with its orders.  The socket's name holds the first one, so that no third program listens there
 * in time; each descriptor comes with the second one, which no list of sockets shows.  Each end asks the kernel for the other's user, which must be
 * its own.  The restored program maps what it got only where the whole of it is overwritten at once, so that nothing can be read in it.
 *
 * All of it is a shortcut: whenever something does not work, the memory is freed and made anew as without it.
 *
 * Threads: each end of a GPU belongs to one thread at a time; the count of kept descriptors is shared.
 *
 * May not go here: which memory; CUDA.
 */
#ifndef NVS_HANDDOWN_H
#define NVS_HANDDOWN_H

#include "base/base.h"

typedef struct nvs_handoff { /* from the coordinator, the same at both ends */
    uint64_t socket; /* 0: there is no hand-off */
    uint64_t token;
} nvs_handoff;

/* The giving end: what leaves this GPU may go to the program that listens. */
void nvs_bequest_begin(uint32_t gpu, const char *gpu_uuid, nvs_handoff handoff);
bool nvs_bequest_open(uint32_t gpu); /* somebody may get something */
/* Sends a descriptor of so much memory; the caller still closes its own.  False: it has not been sent.  Never blocks. */
bool nvs_bequest_give(uint32_t gpu, uint64_t bytes, int descriptor);
void nvs_bequest_end(uint32_t gpu);

/* The taking end: from now on others can give to this process. */
void nvs_inheritance_begin(uint32_t gpu, const char *gpu_uuid, nvs_handoff handoff);
/* A descriptor of so much memory, the caller's to close; -1: there is none.  Never blocks. */
int nvs_inheritance_take(uint32_t gpu, uint64_t bytes);
/* Gives up what has come and was not taken: its memory is free.  True: there was some. */
bool nvs_inheritance_drop(uint32_t gpu);
void nvs_inheritance_end(uint32_t gpu);

/* A descriptor to be kept as long as the memory: the same one or, out of the application's way, a copy that replaces it.  -1: so many
 * are kept that no more may be; the one given is closed. */
int nvs_descriptor_keep(int descriptor);
void nvs_descriptor_drop(int kept); /* closes one that was kept; -1 is none */

void nvs_handdown_after_fork(void); /* in the child: closes its copies of the sockets, and forgets what was kept */

#endif
