/* Streams, events, the executor, and active captures. */
#ifndef SIM_STREAM_H
#define SIM_STREAM_H

#include "stream/work.h"

#define SIM_STREAM_DETACHED ((CUresult)917) /* CUDA_ERROR_STREAM_DETACHED, which CUDA 13.0 does not declare */

typedef struct sim_stream sim_stream;
struct sim_graph; /* graph/graph.h */
struct sim_node;

typedef struct sim_op {
    struct sim_op *next;
    sim_work work;
    uint64_t sequence, submitted_ns, start_ns, end_ns;
    uint64_t clock_end_ns; /* end of a started kernel on the clock of its program (device/slices.c); 0: not yet known */
    bool started;
    bool calling, called; /* a host function runs, or is next to run; it has returned */
    bool counts; /* occupies a place in the launch queue of the stream */
    bool graph;
    uint32_t call; /* number of the submitting call; set, like the symbol, only while there is an observer */
    const char *symbol;
} sim_op;

typedef struct sim_capture {
    struct sim_capture *next;
    uint64_t id;
    uint64_t thread;
    CUstreamCaptureMode mode;
    struct sim_graph *graph;
    sim_stream *origin;
    bool into_existing; /* the graph is the caller's and stays after a failed capture */
    bool invalid;
} sim_capture;

typedef struct sim_nodes { /* a set of graph nodes */
    struct sim_node **all;
    size_t count;
} sim_nodes;

typedef struct sim_stream_capture {
    sim_capture *of; /* NULL: the stream does not capture */
    sim_nodes tail;  /* dependencies of the next captured node */
} sim_stream_capture;

typedef struct sim_queue {
    sim_op *head, *tail;
    uint32_t launches; /* queued operations that count */
    uint64_t last_end_ns;
    bool busy;             /* the stream is in the device's list of busy streams */
    sim_stream *next_busy; /* in that list */
} sim_queue;

struct sim_stream {
    uint32_t magic;
    sim_context *context;
    sim_stream *next; /* of the context */
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t owner_thread; /* of a per-thread default stream; else 0 */
    bool closing;
    bool detached; /* its green context is destroyed */
    sim_queue queue;
    sim_stream_capture capture;
};

static inline bool nvs_sim_is_legacy(const sim_stream *stream) { return stream == stream->context->streams.legacy; }

typedef struct sim_event {
    uint32_t magic;
    sim_context *context;
    struct sim_event *next;
    unsigned flags;
    sim_fence *fence;    /* the last recording; NULL: never recorded */
    uint64_t capture_id; /* the last recording was into this capture; else 0 */
    sim_nodes nodes; /* of that capture, which a wait joins */
} sim_event;

/* The calls from streams to higher folders; start.c sets them once. */
typedef struct sim_stream_hooks {
    CUresult (*effect)(sim_stream *stream, const sim_work *work); /* runs at the end of work on memory; may drop the lock */
    void (*synchronized)(sim_device *device);                     /* after a wait for a stream or an event */
    CUresult (*capture_work)(sim_stream *stream, const sim_work *work);
    CUresult (*capture_record)(sim_stream *stream, sim_event *event, bool external);
    CUresult (*capture_wait)(sim_stream *stream, sim_event *event, bool external);
} sim_stream_hooks;
extern sim_stream_hooks nvs_sim_stream_hooks;

/* stream.c */
CUresult nvs_sim_stream(CUstream handle, sim_stream **out);
CUresult nvs_sim_stream_create(sim_context *context, unsigned flags, int priority, sim_stream **out);
void nvs_sim_stream_destroy(sim_stream *stream); /* as cuStreamDestroy: queued work still runs, the handle is invalid */
void nvs_sim_stream_recycle(sim_stream *stream); /* for a closing stream that is idle */
uint64_t nvs_sim_thread_number(void);            /* 1, 2, ...: identifies the calling thread */

/* executor.c */
CUresult nvs_sim_enqueue(sim_stream *stream, const sim_work *work, bool counts, bool graph); /* never captures */
void nvs_sim_transfer_begin(void); /* drops the lock while an effect moves many bytes */
void nvs_sim_transfer_end(void);
void nvs_sim_transfers_wait(void); /* until no effect moves bytes without the lock */
void nvs_sim_context_wait(sim_context *context, const sim_stream *except); /* until all work submitted so far has ended */

/* kernel_time.c */
/* Sets the ends of running kernels and returns the present time.  The ends may change at check_ns, or when the executor is woken. */
uint64_t nvs_sim_time_kernels(sim_device *device, uint64_t *check_ns);

/* submit.c */
CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work); /* queues or captures; on success owns the parts of the work */
void nvs_sim_stream_wait(sim_stream *stream);
void nvs_sim_device_wait(sim_device *device);

/* event.c */
CUresult nvs_sim_event(CUevent handle, sim_event **out);
CUresult nvs_sim_event_record(sim_event *event, sim_stream *stream, unsigned flags);
CUresult nvs_sim_event_wait(sim_event *event, sim_stream *stream, unsigned flags);
void nvs_sim_event_reset(sim_event *event);

/* capture_state.c */
extern sim_capture *nvs_sim_captures;                  /* all active captures */
CUresult nvs_sim_capture_unsafe(void);                 /* for calls that a capture forbids */
CUresult nvs_sim_capture_status(sim_stream *stream, CUstreamCaptureStatus *out);
CUresult nvs_sim_capture_check(sim_stream *stream);    /* for waits and queries of the stream */
CUresult nvs_sim_capture_implicit(sim_stream *stream); /* for submissions: fails if the legacy stream would join a capture */
bool nvs_sim_capture_context(sim_context *context);    /* invalidates the captures of its streams; true: there were any */

#endif
