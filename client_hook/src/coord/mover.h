/* The movers: a thread for each GPU, which brings this program's memory there to the newest goal.
 *
 * A goal is the bytes that are to be on the GPU; each replaces the one before, at any time.  A mover makes a pass (memory/memory.h) towards it and rests
 * until the next goal: when the goal is reached or nothing fits in between, after a failure, and when it is held.
 *
 * Invariants:
 *  - a pass has one direction and asks for each chunk how far the newest goal is.  It goes on while the goal is ahead, and ends when it is behind;
 *  - what comes in stays below the goal; what goes out ends at or below it.  Nothing swings: a goal has one pass, unless a newer one came during it;
 *  - a pass that comes in waits for a moment for a goal that may rise, unless the GPU is needed (`hurry`).  Meanwhile the mover is at rest: nothing comes
 *    in for this goal any more, and its room may be given to others;
 *  - memory moves with the gate closed and the work drained.  The agent keeps the gate closed until the mover is idle (lease.c).
 *
 * A mover starts with the first goal of its GPU, blocks all signals, and sleeps at rest.  All functions are for the agent thread, except nvs_mover_hurry.
 *
 * Non-goals: when memory may move (loop.c, lease.c), and how it does (memory/memory.h).
 */
#ifndef NVS_MOVER_H
#define NVS_MOVER_H

#include "base/base.h"

typedef struct nvs_goal {
    uint64_t bytes;
    bool rises;    /* probably, soon */
    bool promised; /* the coordinator has promised the room; else the mover requests it, as an allocation does */
} nvs_goal;

typedef struct nvs_mover_state {
    bool busy;      /* a pass is under way, or will be */
    bool at_rest;   /* nothing moves before another goal: not busy, or waiting for a rise */
    bool heeds;     /* the pass knows the newest goal: nothing more moves for an older one */
    uint32_t news;  /* changes when much has moved, and when the mover comes to rest */
    uint32_t error; /* CUresult of the last pass; 0: none */
    uint64_t out_bytes, in_bytes, moving_ns; /* sums: what has moved, and the time of all passes */
} nvs_mover_state;

void nvs_mover_aim(uint32_t gpu, const nvs_goal *goal);
void nvs_mover_hold(uint32_t gpu); /* the goal is what is on the GPU now */
/* Any thread: the GPU, or a context of it, is needed.  NVS_NO_GPU: not known which. */
void nvs_mover_hurry(uint32_t gpu);

void nvs_movers_look(void); /* each round: what the next function tells until the next call, or the next goal */
const nvs_mover_state *nvs_mover_state_of(uint32_t gpu);

bool nvs_movers_stop(uint64_t patience_ns); /* the process ends: movers make no more calls; false: one still does */
void nvs_movers_after_fork(void);

#endif
