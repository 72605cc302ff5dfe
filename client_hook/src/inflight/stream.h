/* The queue of one thread on one stream: how much of it is pending, and waiting until it is less.
 *
 * A ring of events.  What submissions take is estimated from two events that completed one after the other with no gap between (the
 * second was recorded while the first was still pending), so that idle time is not taken for work; the time between them is
 * divided among the submissions of all threads and streams.  With a gap, as in programs that are bound by launching, it is still
 * an upper bound, and lowers an estimate above it.  Among others each submission is seen, and its kind has an estimate of its own
 * (cost.h); of who is alone only samples are seen, and an average has to do.  What the oldest event has taken so far is a lower
 * bound, and counts when kernels suddenly become longer.  When what is pending exceeds the
 * budget, the thread sleeps until a part of it is done; the rest keeps the GPU busy meanwhile.
 *
 * May not go here: whose turn it is to be looked at, and who shares what (pacing.c).
 */
#ifndef NVS_PACE_STREAM_H
#define NVS_PACE_STREAM_H

#include "base/base.h"
#include "inflight/cost.h"

enum { NVS_PACE_RING = 16 }; /* events a stream and thread; one more is kept as the reference for times */
enum { NVS_PACE_IDLE = 8 };  /* so many looks that found nothing pending: the program is bound by launching */

typedef struct nvs_pace_event {
    CUevent event;
    uint32_t work;      /* submissions since the one before */
    uint64_t span;      /* the same of all threads and streams, as far as known: they run in between */
    uint64_t span_ns;   /* what those are thought to take */
    nvs_pace_stretch stretch; /* the work; kinds where each submission was seen */
    bool follows;       /* recorded while the one before was pending: the time between them is work */
} nvs_pace_event;

typedef struct nvs_pace_stream {
    CUstream stream;    /* never NULL when in use */
    CUcontext context;  /* of a default stream, of which each context has its own; else NULL */
    CUcontext owner;    /* of another stream, where its events must be made; NULL: not asked yet, or not known */
    uint32_t gpu;
    bool refused;       /* something failed: left alone for long */
    bool lone;          /* what `every` was chosen for */
    bool exact;         /* each_ns is an estimate and not only an upper bound */
    bool guessed;       /* each_ns is what another stream had */
    bool stuck;         /* waited for in vain: not again before its oldest event is done */
    bool throttled;     /* was made to wait while alone, and its GPU has not been seen idle since */
    uint32_t synchronized; /* the thread's, at the last look */
    uint8_t relief;     /* harm done lately to who is alone; every second one doubles the budget, so that one mishap does not */
    uint8_t waits;      /* without harm */
    uint8_t idle;       /* looks one after the other that found nothing pending, NVS_PACE_IDLE at most */
    uint32_t since;     /* submissions since the last event */
    uint32_t every;     /* so many at most between two events ... */
    uint64_t every_ns;  /* ... nor more than this */
    nvs_pace_stretch stretch; /* since the last event */
    uint32_t first, count; /* pending events in the ring */
    uint32_t work;      /* submissions that the pending events stand for */
    uint64_t work_ns;   /* and what they are thought to take */
    uint64_t last_total, last_total_ns; /* of the GPU, at the newest event */
    uint64_t each_ns;   /* what a submission takes on average; 0: not known yet */
    uint64_t looked_ns; /* when an event was last thought of */
    uint64_t visited_ns;  /* where nothing is ever pending: when its thread came by last; 0: not yet */
    uint64_t quickest_ns; /* and what passed between two submissions, by the quickest stretch since the last event: pauses do not count */
    uint64_t oldest_ns; /* since when the oldest pending event has been the oldest */
    uint64_t used;      /* for replacement */
    CUevent done;       /* the last one that completed, reference of times */
    nvs_pace_event ring[NVS_PACE_RING];
} nvs_pace_stream;

typedef struct nvs_pace_terms { /* of one look */
    uint64_t budget_ns; /* this stream's share */
    uint64_t parts;     /* among so many threads and streams */
    uint64_t now_ns;
    bool lone;
    nvs_pace_costs *costs; /* the thread's */
} nvs_pace_terms;

/* A submission that was seen.  True: time to look. */
static inline bool nvs_pace_stream_add(nvs_pace_stream *entry, uint64_t what, const nvs_pace_costs *costs)
{
    const uint32_t kind = nvs_pace_kind(what), known_ns = costs->ns[kind];
    entry->stretch.kinds.bits[kind / 64] |= (uint64_t)1 << kind % 64;
    entry->stretch.ns += known_ns != 0 ? known_ns : entry->each_ns;
    entry->stretch.guess_ns += known_ns != 0 ? 0 : entry->each_ns;
    return known_ns == 0 || entry->stretch.ns >= entry->every_ns;
}

/* Where its events live; NULL: not known. */
static inline CUcontext nvs_pace_stream_context(const nvs_pace_stream *entry)
{
    return entry->context != NULL ? entry->context : entry->owner;
}

/* While nothing is ever pending: so many more of the thread, by now. */
void nvs_pace_stream_visited(nvs_pace_stream *entry, uint32_t submissions, uint64_t now_ns);
void nvs_pace_stream_nothing_since(nvs_pace_stream *entry); /* what was submitted since the last event does not count */
/* After submissions: takes what is done out, records, waits if too much is pending.  `synchronized`
 * grows whenever the thread has waited for work by itself.  What fails makes it forget the stream for long. */
void nvs_pace_stream_look(nvs_pace_stream *entry, uint32_t synchronized, nvs_pace_terms *now);
void nvs_pace_stream_choose_every(nvs_pace_stream *entry, const nvs_pace_terms *now);
bool nvs_pace_stream_rare(const nvs_pace_stream *entry); /* looked at as seldom as can be */
void nvs_pace_stream_drop(nvs_pace_stream *entry);       /* its events, before the entry is used for another stream */
bool nvs_pace_stream_has_events(const nvs_pace_stream *entry);
void nvs_pace_stream_after_fork(void);

#endif
