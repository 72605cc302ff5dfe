/* What a program may ask of the hook in its own process.  Found with dlsym; without the hook there is no such symbol.
 *
 * All functions are quick, never block, leave errno as it was and may be called from any thread.  `gpu` is the
 * process's own CUDA ordinal.
 */
#ifndef NVSHARE_H
#define NVSHARE_H

#include <stdint.h>

enum nvshare_lease {
    NVSHARE_LEASE_NONE = 0,      /* not held, not asked for */
    NVSHARE_LEASE_WAITING = 1,   /* asked for */
    NVSHARE_LEASE_HELD = 2,
    NVSHARE_LEASE_RETURNING = 3, /* draining before it is given back */
    NVSHARE_LEASE_FREE = 4,      /* no coordinator: runs without (NVSHARE_ON_LOSS=run) */
    NVSHARE_LEASE_UNMANAGED = 5, /* the coordinator does not know this GPU */
};

struct nvshare_gpu {
    uint32_t size;            /* sizeof(struct nvshare_gpu), set by the caller; newer fields go to the end */
    uint32_t lease;           /* enum nvshare_lease */
    uint64_t lease_id;        /* 0: none */
    uint32_t waiters;         /* other clients that wait for the lease that is held */
    uint32_t waiting_threads; /* threads of this process that wait */
    uint64_t calls;           /* gated calls so far */
    uint64_t allocated_bytes; /* by the program, and not freed */
    uint64_t resident_bytes;  /* the part of them on the card */
};

const char *nvshare_version(void);

/* 1: gates are armed and the agent runs; 0: the hook is loaded and idle (no NVSHARE_SOCKET, or CUDA is not used yet);
 * -1: it could not start and lets everything through. */
int nvshare_active(void);

/* 0, or -1: `gpu` is out of range or `size` is not one that this version knows. */
int nvshare_gpu_state(uint32_t gpu, struct nvshare_gpu *out);

/* Gives the lease back as soon as submitted work is done, if another client waits for it; otherwise does nothing.
 * 0, or -1 as above. */
int nvshare_yield(uint32_t gpu);

/* The program has done one more of its steps, whatever these are: the coordinator judges speed by them where it can. */
void nvshare_step(void);

/* Whether memory of this program moves because of others.  Adds up in `times` (or NULL) each order to evict, and each time that evictions became likely.
 * 1: the coordinator expects more of them; 0: it does not; -1: a stream is captured, so nothing may be freed now. */
int nvshare_pressure(uint64_t *times);

/* The program has freed so many bytes because of that; `nvshare-ctl memory` shows the sum.  0, or -1 as above. */
int nvshare_released(uint32_t gpu, uint64_t bytes);

/* Not 0 while the calling thread is in a call that passed the gate; UINT32_MAX on a thread of the hook's own.  For tools that
 * look for work that bypasses the gate. */
uint32_t nvshare_gate_depth(void);

#endif
