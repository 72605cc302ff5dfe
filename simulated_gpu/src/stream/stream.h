/* Streams, events, the executor, and which captures are under way. */
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
    uint64_t clock_end_ns; /* of a started kernel: its end on the clock of its program (slices.c); 0: not known yet */
    bool started, counts; /* counts: takes a place of the stream's launch queue */
    bool graph;
    uint32_t call; /* the call that submitted it; this and the symbol only while there is an observer */
    const char *symbol;
} sim_op;

typedef struct sim_capture {
    struct sim_capture *next;
    uint64_t id;
    uint64_t thread;
    CUstreamCaptureMode mode;
    struct sim_graph *graph;
    sim_stream *origin;
    bool into_existing; /* the caller's graph, not destroyed with the capture */
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

struct sim_stream {
    uint32_t magic;
    sim_context *context;
    sim_stream *next;      /* of the context */
    sim_stream *next_busy; /* of the device: streams that have work */
    unsigned flags;
    int priority;
    uint64_t id;
    uint64_t owner_thread; /* of a per-thread default stream; else 0 */
    bool legacy, busy, closing;
    bool detached; /* its green context is gone */
    struct {
        sim_op *head, *tail;
        uint32_t launches; /* queued operations that count */
        uint64_t submitted, completed;
        uint64_t last_end_ns;
    } queue;
    sim_stream_capture capture;
};

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
    CUresult (*effect)(sim_stream *stream, const sim_work *work); /* work that touches memory has ended; the lock may be dropped */
    void (*synchronized)(sim_device *device);                     /* after a wait for a stream or an event */
    CUresult (*capture_work)(sim_stream *stream, const sim_work *work);
    CUresult (*capture_record)(sim_stream *stream, sim_event *event, bool external);
    CUresult (*capture_wait)(sim_stream *stream, sim_event *event, bool external);
} sim_stream_hooks;
extern sim_stream_hooks nvs_sim_stream_hooks;

/* stream.c */
CUresult nvs_sim_stream(CUstream handle, sim_stream **out);
CUresult nvs_sim_stream_create(sim_context *context, unsigned flags, int priority, sim_stream **out);
void nvs_sim_stream_destroy(sim_stream *stream); /* as cuStreamDestroy: queued work still runs, the handle is dead */
void nvs_sim_stream_recycle(sim_stream *stream); /* a closing stream has become idle */
uint64_t nvs_sim_thread_number(void);            /* 1, 2, ...; the calling thread's, as per-thread streams and captures know it */

/* executor.c */
CUresult nvs_sim_enqueue(sim_stream *stream, const sim_work *work, bool counts, bool graph); /* never captures */
void nvs_sim_transfer_begin(void); /* in an effect: drops the lock while many bytes move */
void nvs_sim_transfer_end(void);
void nvs_sim_transfers_wait(void); /* until no effect moves bytes without the lock */
void nvs_sim_context_wait(sim_context *context, const sim_stream *except); /* until all work submitted so far is done; sleeps */

/* kernel_time.c */
/* Sets the ends of running kernels.  Returns the present time; the ends may have moved at look_ns, or when the executor is woken. */
uint64_t nvs_sim_time_kernels(sim_device *device, uint64_t *look_ns);

/* submit.c */
CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work); /* queues, or captures; takes what the work owns */
void nvs_sim_stream_wait(sim_stream *stream);
void nvs_sim_device_wait(sim_device *device);

/* event.c */
CUresult nvs_sim_event(CUevent handle, sim_event **out);
CUresult nvs_sim_event_record(sim_event *event, sim_stream *stream, unsigned flags);
CUresult nvs_sim_event_wait(sim_event *event, sim_stream *stream, unsigned flags);
void nvs_sim_event_reset(sim_event *event);

/* capture_state.c */
extern sim_capture *nvs_sim_captures;                  /* all that are under way */
CUresult nvs_sim_capture_unsafe(void);                 /* a call that is not allowed during a capture */
CUresult nvs_sim_capture_status(sim_stream *stream, CUstreamCaptureStatus *out);
CUresult nvs_sim_capture_check(sim_stream *stream);    /* synchronizing or querying this stream */
CUresult nvs_sim_capture_implicit(sim_stream *stream); /* submitting to it: would the legacy stream join a capture? */
bool nvs_sim_capture_context(sim_context *context);    /* true, and those captures are invalid, if a stream of the context captures */

#endif
