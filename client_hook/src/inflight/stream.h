/* The queue of one thread on one stream: estimates its pending work, and waits until there is less.
 *
 * The queue is a ring of events.  The time between two completed events gives the time of the submissions between them, of all threads and
 * streams.  It is exact if the second event was recorded while the first was pending, so that the GPU was not idle between them.  Otherwise it
 * is an upper bound, and only lowers a higher estimate.  Beside other programs each kind of submission has an estimate; a program
 * that is alone is only sampled, and has an average.  The age of the oldest event is a lower bound, which detects kernels that become longer.
 * When the pending work exceeds the budget, the thread sleeps until a part of it is done; the rest keeps the GPU busy meanwhile.
 *
 * Estimates of GPU time for each kind of submission: programs mix kernels of milliseconds with fills of microseconds, and an average of both
 * is wrong for each.
 *
 * Each thread has a small hash table of estimates; kinds with the same hash share one.  The ratio of measured to estimated time of a stretch of
 * submissions corrects the estimates of all its kinds.  Stretches differ in their mixture, so each estimate converges.  A new kind gets the
 * time that the known kinds leave.
 *
 * Non-goals: when a stream is checked; shares of the budget (pacing.c).
 */
#ifndef NVS_STREAM_H
#define NVS_STREAM_H

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
    uint64_t basis_ns; /* pace_basis() at its end */
} nvs_pace_stretch;

/* --- the queue --- */

enum { NVS_PACE_RING = 16 }; /* events of a stream and thread; one more is the reference for times */
enum { NVS_PACE_IDLE = 8 };  /* consecutive checks without pending work: the program is bound by launching */
enum { NVS_PACE_RETRY = 1 << 16 }; /* submissions to a stream that could not be paced, until the next attempt */

typedef struct nvs_pace_event {
    CUevent event;
    uint32_t work;      /* submissions since the event before */
    uint64_t span;      /* the same of all threads and streams, which share the GPU */
    uint64_t span_ns;   /* their estimated time */
    nvs_pace_stretch stretch; /* the work; its kinds where each submission was counted */
    bool follows;       /* recorded while the event before was pending, so that the GPU worked between them */
} nvs_pace_event;

/* Fields that most submissions read come first, on two cache lines; the ring comes last. */
typedef struct nvs_pace_stream {
    CUstream stream;    /* never NULL when in use */
    CUcontext context;  /* of a default stream, of which each context has its own; else NULL */
    CUcontext owner;    /* of another stream, where its events are made; NULL: not known (yet) */
    uint32_t gpu;
    uint64_t used;      /* for replacement */
    struct {            /* until the next event.  pacing.c counts; nvs_pace_stream_choose_every sets the limits */
        bool lone;      /* the limits are for a program that is alone */
        uint32_t since; /* submissions since the last event */
        uint32_t every; /* most submissions between two events; NVS_PACE_RETRY: something failed ... */
        uint64_t every_ns; /* ... and most estimated time */
        nvs_pace_stretch stretch; /* since the last event */
    } due;
    struct {            /* average time of a submission; adapt() and follow() change it */
        uint64_t each_ns; /* 0: not known yet */
        bool exact;     /* an estimate, and not only an upper bound */
        bool guessed;   /* of another stream */
    } estimate;
    struct {            /* the GPU's totals at the newest event; record() sets them */
        uint64_t total, total_ns;
    } newest;
    struct {            /* an idle queue */
        uint8_t checks; /* consecutive ones without pending work, NVS_PACE_IDLE at most */
        uint64_t visited_ns;  /* the last sampled submission; 0: none */
        uint64_t quickest_ns; /* the shortest time between submissions since the last event, which excludes pauses */
    } idle;
    struct {            /* harm to a program that is alone; detect_harm() and throttle() change it */
        bool throttled; /* pacing made the thread wait, and the GPU has not been idle since */
        uint8_t relief; /* recent harm; every second one doubles the budget */
        uint8_t waits;  /* without harm */
        uint32_t synchronized; /* the thread's count, at the last check */
    } harm;
    uint64_t checked_ns; /* the last check */
    struct {            /* events; record() adds one, take_oldest() removes one */
        uint32_t first, count;
        uint32_t work;  /* submissions that the pending events stand for */
        uint64_t work_ns; /* and their estimated time */
        uint64_t oldest_ns; /* since when the oldest event has been the oldest */
        bool stuck;     /* a wait has timed out: the next one only after the oldest event is done */
        uint8_t timeouts; /* consecutive ones */
        CUevent done;   /* the last one that completed, reference of times */
        nvs_pace_event ring[NVS_PACE_RING];
    } pending;
} nvs_pace_stream;

typedef struct nvs_pace_terms { /* of one check */
    uint64_t budget_ns; /* this stream's share */
    uint64_t parts;     /* threads and streams that share the budget */
    uint64_t now_ns;
    bool lone;
    nvs_pace_costs *costs; /* the thread's */
} nvs_pace_terms;

/* Counts a submission.  True: a check is due. */
static inline bool nvs_pace_stream_add(nvs_pace_stream *entry, uint64_t what, const nvs_pace_costs *costs)
{
    const uint32_t kind = nvs_pace_kind(what), known_ns = costs->ns[kind];
    entry->due.stretch.kinds.bits[kind / 64] |= (uint64_t)1 << kind % 64;
    entry->due.stretch.ns += known_ns != 0 ? known_ns : entry->estimate.each_ns;
    entry->due.stretch.guess_ns += known_ns != 0 ? 0 : entry->estimate.each_ns;
    return known_ns == 0 || entry->due.stretch.ns >= entry->due.every_ns;
}

/* Where its events live; NULL: not known. */
static inline CUcontext nvs_pace_stream_context(const nvs_pace_stream *entry)
{
    return entry->context != NULL ? entry->context : entry->owner;
}

/* Idle queue: the thread has made this many more submissions. */
void nvs_pace_stream_visited(nvs_pace_stream *entry, uint32_t submissions, uint64_t now_ns);
void nvs_pace_stream_nothing_since(nvs_pace_stream *entry); /* drops the submissions since the last event */
/* Removes completed events, records one, and waits if too much is pending.  `synchronized` counts the thread's own waits for its work.  After
 * a failure the stream is not paced for many submissions. */
void nvs_pace_stream_check(nvs_pace_stream *entry, uint32_t synchronized, nvs_pace_terms *now);
void nvs_pace_stream_choose_every(nvs_pace_stream *entry, const nvs_pace_terms *now);
bool nvs_pace_stream_rare(const nvs_pace_stream *entry); /* at the longest interval between checks */
void nvs_pace_stream_drop(nvs_pace_stream *entry);       /* its events, before the entry is used for another stream */
bool nvs_pace_stream_has_events(const nvs_pace_stream *entry);
void nvs_pace_stream_after_fork(void);

#endif
