/* Work, streams, events and captures as records; the functions of stream/, and those elsewhere that work on streams. */
#ifndef SIM_STREAM_H
#define SIM_STREAM_H

#include "device/device.h"

typedef struct sim_fence { /* one recording of an event; the event and the waiting operations share it */
    uint32_t references;
    bool done;
    uint64_t end_ns;
} sim_fence;

typedef struct sim_copy_end { /* in host address space */
    char *start;
    size_t pitch, slice;      /* bytes to the next row, and to the next plane */
    const sim_device *rights; /* access rights of this GPU apply (memory/peers.c); NULL: that of the stream */
} sim_copy_end;

typedef struct sim_copy {
    sim_copy_end target, source;
    size_t width, height, depth; /* width in bytes */
    void *snapshot;              /* owned copy of the source, if it was taken at submission */
} sim_copy;

typedef struct sim_fill {
    char *target;
    size_t pitch, width, height; /* width in elements */
    uint32_t value;
    uint32_t element;         /* 1, 2 or 4 bytes */
    const sim_device *rights; /* as in a copy */
} sim_fill;

typedef struct sim_kernel {
    sim_context *context; /* of a graph node; NULL: that of the stream */
    uint32_t demand;          /* millionths of the multiprocessors */
    uint64_t to, from, bytes; /* the arguments of nvs_copy; 0 bytes: another kernel */
} sim_kernel;

typedef struct sim_host_call {
    CUhostFn function;
    CUstreamCallback callback;
    CUstream stream;
    void *data;
} sim_host_call;

typedef struct sim_prefetch {
    CUdeviceptr pointer;
    size_t bytes;
    int32_t gpu; /* -1: to the host */
} sim_prefetch;

typedef struct sim_value {
    CUdeviceptr pointer;
    uint64_t value;
    uint32_t bytes;
    unsigned compare; /* of a wait: CUstreamWaitValue_flags */
} sim_value;

enum sim_op_kind {
    OP_EMPTY,
    OP_KERNEL,
    OP_COPY,
    OP_FILL,
    OP_HOST,
    OP_CALLBACK,
    OP_RECORD,
    OP_WAIT,
    OP_PREFETCH,
    OP_FREE,
    OP_ALLOCATE, /* graphs only */
    OP_WRITE_VALUE,
    OP_WAIT_VALUE,
};

typedef struct sim_work {
    enum sim_op_kind kind;
    uint64_t duration_ns;
    uint64_t bytes;
    union {
        sim_copy copy;
        sim_fill fill;
        sim_host_call host;
        sim_kernel kernel;
        sim_fence *fence; /* one reference is owned */
        sim_prefetch prefetch;
        CUdeviceptr pointer; /* OP_FREE, OP_ALLOCATE */
        sim_value value; /* OP_WRITE_VALUE, OP_WAIT_VALUE */
    } u;
} sim_work;

#define SIM_STREAM_DETACHED ((CUresult)917) /* CUDA_ERROR_STREAM_DETACHED, which CUDA 13.0 does not declare */

typedef struct sim_stream sim_stream;
struct sim_node; /* graph/graph.h */

typedef struct sim_op {
    struct sim_op *next;
    sim_work work;
    uint64_t sequence, submitted_ns, start_ns, end_ns;
    uint64_t clock_end_ns; /* end of a started kernel on the clock of its program (kernel_time.c); 0: not yet known */
    bool started;
    bool calling, called; /* a host function runs, or is next to run; it has returned */
    bool counts; /* occupies a place in the launch queue of the stream */
    bool graph;
} sim_op;

typedef struct sim_nodes { /* a set of graph nodes */
    struct sim_node **all;
    size_t count;
} sim_nodes;

typedef struct sim_stream_capture {
    struct sim_capture *of; /* NULL: the stream does not capture */
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
    CUlaunchAttributeValue attributes[CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN + 1]; /* by their ids; without effect */
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

/* device/current.c */
CUresult nvs_sim_stream(CUstream handle, sim_stream **out);

/* queue.c */
CUresult nvs_sim_stream_create(sim_context *context, unsigned flags, int priority, sim_stream **out);
void nvs_sim_stream_destroy(sim_stream *stream); /* as cuStreamDestroy: queued work still runs, the handle is invalid */
void nvs_sim_stream_recycle(sim_stream *stream); /* for a closing stream that is idle */
uint64_t nvs_sim_thread_number(void);            /* 1, 2, ...: identifies the calling thread */
extern uint64_t nvs_sim_sequence; /* of the newest operation */
uint64_t nvs_sim_copy_ns(uint64_t bytes);
sim_fence *nvs_sim_fence_new(void);
void nvs_sim_fence_unref(sim_fence *fence);
void nvs_sim_discard(const sim_work *work); /* frees the owned parts */
void nvs_sim_event_reset(sim_event *event);
sim_fence *nvs_sim_event_begin(sim_event *event); /* a recording: the event and the caller have a reference each; NULL: no memory */
void nvs_sim_stream_wait(sim_stream *stream);
void nvs_sim_context_wait(sim_context *context, const sim_stream *except); /* until all work submitted so far has ended */
void nvs_sim_device_wait(sim_device *device);

/* kernel_time.c */
/* Sets the ends of running kernels and returns the present time.  The ends may change at check_ns, or when the executor is woken. */
uint64_t nvs_sim_time_kernels(sim_device *device, uint64_t *check_ns);
uint32_t nvs_sim_wakes(const sim_device *device);
void nvs_sim_wake(sim_device *device);                                     /* the executor */
void nvs_sim_sleep(sim_device *device, uint32_t wakes, uint64_t until_ns); /* until nvs_sim_wakes changes; drops nvs_sim_lock */

/* executor.c: the work is owned here, also after an error */
CUresult nvs_sim_enqueue(sim_stream *stream, const sim_work *work, bool counts, bool graph); /* never captures */
CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work); /* queues or captures */

/* streams.c */
CUresult nvs_sim_event(CUevent handle, sim_event **out);
CUresult nvs_sim_event_record(sim_event *event, sim_stream *stream, unsigned flags);
CUresult nvs_sim_event_wait(sim_event *event, sim_stream *stream, unsigned flags);

/* graph/capture.c */
CUresult nvs_sim_capture_unsafe(void);                 /* for calls that a capture forbids */
CUresult nvs_sim_capture_check(sim_stream *stream);    /* for waits and queries of the stream */
CUresult nvs_sim_capture_implicit(sim_stream *stream); /* for submissions: fails if the legacy stream would join a capture */
bool nvs_sim_capture_context(sim_context *context);    /* invalidates the captures of its streams; true: there were any */
void nvs_sim_capture_end_all(sim_context *context);
CUresult nvs_sim_capture_work(sim_stream *stream, const sim_work *work);
CUresult nvs_sim_capture_record(sim_stream *stream, sim_event *event, bool external);
CUresult nvs_sim_capture_wait(sim_stream *stream, sim_event *event, bool external);

#endif
