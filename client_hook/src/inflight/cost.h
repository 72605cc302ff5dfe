/* Estimates of GPU time for each kind of submission: programs mix kernels of milliseconds with fills of microseconds, and an average of both
 * is wrong for each.
 *
 * Each thread has a small hash table of estimates; kinds with the same hash share one.  The ratio of measured to estimated time of a stretch of
 * submissions corrects the estimates of all its kinds.  Stretches differ in their mixture, so each estimate converges.  A new kind gets the
 * time that the known kinds leave.
 */
#ifndef NVS_PACE_COST_H
#define NVS_PACE_COST_H

#include "base/base.h"

enum { NVS_PACE_KINDS = 256, NVS_PACE_SET_WORDS = NVS_PACE_KINDS / 64 };

typedef struct nvs_pace_costs {
    uint32_t ns[NVS_PACE_KINDS]; /* 0: not known yet */
} nvs_pace_costs;

typedef struct nvs_pace_set { /* of kinds */
    uint64_t bits[NVS_PACE_SET_WORDS];
} nvs_pace_set;

/* A value for nvs_pace_after() that tells kinds of work apart: the entry point, what it runs, and the size as a power of two. */
static inline uint64_t nvs_pace_what(uint32_t entry_point, const void *runs, uint64_t size)
{
    return (uint64_t)entry_point << 8 ^ (uint64_t)(uintptr_t)runs ^ (size == 0 ? 0 : 64u - (unsigned)__builtin_clzll(size));
}

static inline uint32_t nvs_pace_kind(uint64_t what)
{
    return (uint32_t)(what * 0x9e3779b97f4a7c15u >> 56); /* Fibonacci hashing: the top bits mix best */
}
_Static_assert(NVS_PACE_KINDS == 1 << (64 - 56), "the hash has as many bits as the table has places");

typedef struct nvs_pace_stretch { /* consecutive submissions */
    nvs_pace_set kinds;
    uint64_t ns;       /* estimated time */
    uint64_t guess_ns; /* its part for kinds without an estimate */
    uint64_t basis_ns; /* nvs_pace_basis() at its end */
} nvs_pace_stretch;

/* The sum of the kinds' estimates.  Its change since the stretch scales the stretch's estimate to the present. */
uint64_t nvs_pace_basis(const nvs_pace_costs *costs, const nvs_pace_set *kinds);
/* The stretch took `took_ns`; not `exact`: at most that. */
void nvs_pace_learn(nvs_pace_costs *costs, const nvs_pace_stretch *stretch, uint64_t took_ns, bool exact);

#endif
