/* Inside of the CUDA driver double: objects, the lock, and what each file offers the others.
 *
 * One mutex, nvs_sim_lock, guards everything in the process.  Public functions take it once, with NVS_SIM_ENTER*, and
 * call internal ones (nvs_sim_*) that expect it held.  It is dropped only while a thread sleeps, while an executor
 * moves many bytes, and around callbacks.  The lock in the shared file is inside it.
 */
#ifndef SIM_H
#define SIM_H

#ifndef __CUDA_API_VERSION_INTERNAL
#define __CUDA_API_VERSION_INTERNAL /* every version of every function under its exported name */
#endif
#include <cuda.h>

#include "simulated_gpu.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define SIM_EXPORT __attribute__((visibility("default")))
#define SIM_STREAM_DETACHED ((CUresult)917) /* CUDA_ERROR_STREAM_DETACHED, which CUDA 13.0 does not declare */

enum { /* first word of each object: a wrong or dead handle is told apart, because dead objects stay readable */
    SIM_CONTEXT = 0x43585431,
    SIM_STREAM = 0x53545231,
    SIM_EVENT = 0x45564e31,
    SIM_MODULE = 0x4d4f4431,
    SIM_FUNCTION = 0x464e4331,
    SIM_GRAPH = 0x47525031,
    SIM_NODE = 0x4e4f4431,
    SIM_EXEC = 0x45584531,
    SIM_POOL = 0x504f4f31,
    SIM_ARRAY = 0x41525231,
    SIM_GREEN = 0x47524e31,
};

typedef struct sim_device sim_device;
typedef struct sim_context sim_context;
typedef struct sim_stream sim_stream;
typedef struct sim_graph sim_graph;
typedef struct sim_node sim_node;
typedef struct sim_capture sim_capture;
typedef struct sim_graph_memory sim_graph_memory;

typedef struct sim_fence { /* one recording of an event; shared by the event and by those who wait for it */
    uint32_t references;
    bool done;
    uint64_t end_ns;
} sim_fence;

typedef struct sim_copy { /* width x height x depth bytes between linear host mappings */
    char *target;
    const char *source;
    size_t target_pitch, target_slice, source_pitch, source_slice;
    size_t width, height, depth;
    const sim_device *target_by, *source_by; /* whose rights count at each end; NULL: the stream's (peers.c) */
    void *snapshot; /* owned copy of the source, when it was taken at submission */
} sim_copy;

typedef struct sim_fill {
    char *target;
    size_t pitch, width, height; /* width in elements */
    uint32_t value;
    uint32_t element; /* 1, 2 or 4 bytes */
    const sim_device *by; /* as in a copy */
} sim_fill;

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
};

typedef struct sim_work { /* what is to be done: part of a queued operation or of a graph's node */
    enum sim_op_kind kind;
    uint64_t duration_ns;
    uint64_t bytes;
    union {
        sim_copy copy;
        sim_fill fill;
        struct {
            CUhostFn function;
            CUstreamCallback callback;
            CUstream stream;
            void *data;
        } host;
        struct {
            CUDA_KERNEL_NODE_PARAMS kernel; /* kernelParams and extra are good only during the launch call */
            sim_context *by;                /* of a graph's node; NULL: the stream's */
            uint64_t to, from, bytes;       /* what nvs_copy was told; 0 bytes: it is another kernel */
        };
        sim_fence *fence; /* one reference is owned */
        struct {
            CUdeviceptr pointer;
            size_t bytes;
            int32_t gpu; /* -1: to the host */
        } prefetch;
        CUdeviceptr pointer; /* OP_FREE */
        struct {
            CUdeviceptr pointer;
            uint64_t value;
            uint32_t bytes;
        } write;
    } u;
} sim_work;

typedef struct sim_op {
    struct sim_op *next;
    sim_work work;
    uint64_t sequence, submitted_ns, start_ns, end_ns;
    bool started, counts; /* counts: takes a place of the stream's launch queue */
    bool graph;
    uint32_t call; /* which submitted it; these two only while somebody observes */
    const char *symbol;
} sim_op;

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
    sim_op *head, *tail;
    uint32_t launches; /* queued operations that count */
    uint64_t submitted, completed;
    uint64_t last_end_ns;
    sim_capture *capture;
    sim_node **capture_tail; /* what the next captured node depends on */
    size_t capture_tail_count;
};

typedef struct sim_event {
    uint32_t magic;
    sim_context *context;
    struct sim_event *next;
    unsigned flags;
    sim_fence *fence;     /* the last recording; NULL: never recorded */
    sim_capture *capture; /* the last recording was into this capture */
    uint64_t capture_id;
    sim_node **nodes;
    size_t node_count;
} sim_event;

typedef struct sim_storage { /* local storage that libcudart attaches to a context */
    struct sim_storage *next;
    void *key, *value;
    void (*destroy)(CUcontext, void *, void *);
} sim_storage;

struct sim_context {
    uint32_t magic;
    sim_device *device;
    sim_context *next;
    bool primary;
    sim_context *owner; /* of a green context: the primary one, whose memory it uses */
    unsigned flags;
    uint64_t id;
    uint32_t references; /* primary: retain count; made by cuCtxCreate: users beside the first */
    CUresult error;      /* sticky: ILLEGAL_ADDRESS and the like.  Physical memory and its mappings alone can still be given back */
    sim_stream *streams, *default_stream;
    sim_stream *graph_stream; /* for nodes of graphs that are launched on other GPUs; NULL: there was none */
    sim_event *events;
    struct sim_module *modules;
    sim_storage *storage;
    CUfunc_cache cache;
    CUsharedconfig shared_config;
    size_t limits[CU_LIMIT_MAX];
    uint64_t peers; /* bit per visible device */
};

struct sim_device {
    int ordinal;      /* CUdevice */
    uint32_t gpu;     /* index in the shared file */
    uint64_t capacity_bytes;
    uint8_t uuid[16];
    bool instance; /* a MIG instance */
    sim_context primary;
    sim_context *contexts; /* all live ones, the primary one included */
    CUresult error;        /* of the first context with a sticky one: this process opens no more contexts here */
    sim_stream *busy;
    bool executor_started;
    pthread_cond_t work;
    struct sim_pool *default_pool, *current_pool, *pools;
    uint64_t graph_bytes;    /* of the card, kept for graphs */
    uint64_t graph_attached; /* of these, with executables or allocations */
    uint64_t graph_high[2];  /* marks: used, reserved */
};

typedef struct sim_settings {
    int driver_version;
    uint64_t kernel_ns;
    double copy_bytes_per_ns; /* 0: instantaneous */
    uint64_t context_bytes;
    uint32_t launch_queue;
    bool peers; /* GPUs can be given access to each other's memory */
} sim_settings;

typedef struct sim_thread {
    sim_context *stack[32];
    bool late[32]; /* made current after its end */
    uint32_t depth;
    uint64_t number;   /* 1, 2, ...; 0 until first asked for */
    bool per_thread;   /* set by a _ptsz/_ptds entry point for the call that follows */
    bool call_per_thread;
    bool in_callback; /* an executor inside of a host function: no call is permitted */
    uint32_t call;    /* number of the public call that the thread is in, or was last */
    CUstreamCaptureMode capture_mode;
} sim_thread;

extern pthread_mutex_t nvs_sim_lock;
extern pthread_cond_t nvs_sim_done; /* broadcast when operations have completed */
extern sim_settings nvs_sim_settings;
extern sim_device nvs_sim_devices[NVS_SIM_MAX_GPUS];
extern int nvs_sim_device_count;
extern nvs_sim_shared *nvs_sim_shared_state;
extern _Thread_local sim_thread nvs_sim_thread;
extern uint64_t nvs_sim_next_id;
extern uint64_t nvs_sim_sequence; /* of the operation queued last */

uint64_t nvs_sim_now_ns(void);
void nvs_sim_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
uint64_t nvs_sim_thread_number(void);

/* init.c */
CUresult nvs_sim_enter(const char *function, bool need_init); /* faults, then the lock is taken if SUCCESS */
void nvs_sim_leave(void);
CUresult nvs_sim_device(CUdevice ordinal, sim_device **out);

/* observe.c */
extern const nvs_sim_observer *_Atomic nvs_sim_watcher;
void nvs_sim_tell_call(const nvs_sim_observer *watcher, const char *function);
void nvs_sim_mark(sim_op *op); /* it is being submitted */
void nvs_sim_tell_ran(const nvs_sim_observer *watcher, const sim_op *op);
void nvs_sim_inject(void); /* what CUDA_INJECTION64_PATH names, once */

/* faults.c */
extern _Atomic bool nvs_sim_faults_armed;
CUresult nvs_sim_fault(const char *function);
bool nvs_sim_is_missing(const char *function);
void nvs_sim_faults_from_environment(void);

/* shared.c */
nvs_sim_shared *nvs_sim_shared_open(const char **problem);
nvs_sim_process *nvs_sim_shared_self(nvs_sim_shared *shared);
void nvs_sim_shared_lock(nvs_sim_shared *shared);
void nvs_sim_shared_unlock(nvs_sim_shared *shared);
void nvs_sim_shared_reap(nvs_sim_shared *shared); /* with its lock: forgets dead processes */
uint64_t nvs_sim_shared_used(nvs_sim_shared *shared, uint32_t gpu);
nvs_sim_record *nvs_sim_shared_records(nvs_sim_shared *shared);

/* charge.c */
bool nvs_sim_charge(uint32_t gpu, uint64_t bytes); /* false: no room, even after others' managed memory gave way */
void nvs_sim_uncharge(uint32_t gpu, uint64_t bytes);
uint64_t nvs_sim_page_in(uint32_t gpu, uint64_t bytes); /* managed memory: what found room */
void nvs_sim_page_out(uint32_t gpu, uint64_t bytes);
uint64_t nvs_sim_paged(uint32_t gpu); /* what is left of ours */
uint64_t nvs_sim_free(uint32_t gpu);
void nvs_sim_attach(uint32_t gpu, int change);
bool nvs_sim_registered(void); /* this process has a place in the shared file */
void nvs_sim_trace(uint32_t gpu, uint64_t stream, uint16_t kind, uint64_t start_ns, uint64_t end_ns, uint64_t bytes);

/* current.c */
sim_context *nvs_sim_current(void);
CUresult nvs_sim_no_context(void); /* why there is none that can be used */
CUresult nvs_sim_push(sim_context *context);

/* context.c */
bool nvs_sim_alive(sim_context *context);
CUresult nvs_sim_context(CUcontext handle, sim_context **out); /* NULL: the current one */
CUresult nvs_sim_context_usable(sim_context *context);         /* its sticky error */
void nvs_sim_context_wait(sim_context *context);               /* everything submitted so far is done; sleeps */
void nvs_sim_device_wait(sim_device *device);
CUresult nvs_sim_primary_retain(sim_device *device, sim_context **out);
CUresult nvs_sim_context_create(unsigned flags, CUdevice dev, CUcontext *out); /* and makes it current */
CUresult nvs_sim_green_open(sim_device *device, sim_context **out);
void nvs_sim_green_close(sim_context *context);

/* stream.c */
CUresult nvs_sim_stream(CUstream handle, sim_stream **out);
CUresult nvs_sim_stream_create(sim_context *context, unsigned flags, int priority, sim_stream **out);
void nvs_sim_stream_destroy(sim_stream *stream);
CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work);   /* queues, or captures; takes what the work owns */
CUresult nvs_sim_enqueue(sim_stream *stream, const sim_work *work, bool counts, bool graph); /* never captures */
void nvs_sim_stream_wait(sim_stream *stream);
bool nvs_sim_stream_idle(sim_stream *stream);
CUresult nvs_sim_execute(sim_stream *stream, const sim_work *work, uint64_t end_ns); /* effect.c: the lock may be dropped */
void nvs_sim_discard(sim_work *work); /* frees what it owns */
extern uint32_t nvs_sim_effects_unlocked; /* copies and fills that are at it without the lock */

/* event.c */
CUresult nvs_sim_event_record(CUevent event, sim_stream *stream, unsigned flags);
CUresult nvs_sim_event_wait(CUevent event, sim_stream *stream, unsigned flags);
sim_fence *nvs_sim_fence_new(void);
void nvs_sim_fence_unref(sim_fence *fence);
void nvs_sim_event_reset(sim_event *event);

/* copy.c */
uint64_t nvs_sim_copy_ns(uint64_t bytes);

/* copy_shapes.c */
CUresult nvs_sim_copy_submit(sim_stream *stream, sim_copy *copy, bool host_waits, bool asynchronous);
void nvs_sim_copy_describe(const sim_copy *copy, CUDA_MEMCPY3D *out);

/* memory.c */
enum sim_memory_kind { MEM_DEVICE, MEM_HOST, MEM_MANAGED, MEM_MAPPED, MEM_POOL, MEM_REGISTERED, MEM_IMPORTED, MEM_GRAPH };
typedef struct sim_allocation {
    uintptr_t base;
    size_t bytes;         /* as asked for */
    size_t charged_bytes; /* on the device; for managed memory what is resident */
    size_t mapped_bytes;  /* of host address space; 0: it came from malloc */
    enum sim_memory_kind kind;
    sim_device *device;
    sim_context *context;
    unsigned flags;
    uint64_t id;
    int32_t last_prefetch, preferred;
    bool read_mostly, sync_memops;
    bool freed; /* MEM_POOL: its release does not change what its pool calls used */
    uint64_t accessed_by; /* MEM_MAPPED, MEM_POOL: who has rights; MEM_MANAGED: who was advised */
    void *handle; /* MEM_MAPPED: the physical handle; MEM_POOL: the pool; MEM_GRAPH: a sim_graph_memory */
    int shared_file; /* of memory that was exported (ipc.c): its descriptor + 1 */
    int32_t shared_by;   /* MEM_IMPORTED: whose it is, */
    uint64_t shared_id;  /* its id there, */
    uint32_t references; /* and how often it is open */
} sim_allocation;
sim_allocation *nvs_sim_find(uintptr_t address); /* whichever contains it; NULL: pageable host memory */
CUresult nvs_sim_allocate(sim_context *context, size_t bytes, enum sim_memory_kind kind, unsigned flags, CUdeviceptr *out);
CUresult nvs_sim_release(uintptr_t base);
CUresult nvs_sim_insert(const sim_allocation *allocation);
void nvs_sim_remove(sim_allocation *allocation);
bool nvs_sim_accessible(uintptr_t address, size_t bytes); /* false: in a reserved range and not backed, or beyond its end */
size_t nvs_sim_allocation_count(void);
extern uint64_t nvs_sim_managed_count; /* of them */
sim_allocation *nvs_sim_allocation_at(size_t index);

/* peers.c */
bool nvs_sim_peers_possible(const sim_device *one, const sim_device *other);
bool nvs_sim_copy_reaches(const sim_device *by, uintptr_t address, size_t bytes); /* and it is there */
bool nvs_sim_fill_reaches(const sim_context *by, uintptr_t address, size_t bytes);
bool nvs_sim_kernel_reaches(const sim_context *by, uintptr_t address, size_t bytes);

/* managed.c */
void nvs_sim_managed_touch(sim_device *device);
void nvs_sim_managed_prefetch(CUdeviceptr pointer, size_t bytes, int32_t gpu);
void nvs_sim_managed_reconcile(uint32_t gpu);
void nvs_sim_managed_forget(sim_allocation *allocation); /* it is no longer in the table */

/* pool.c */
void nvs_sim_pool_freed(const sim_allocation *allocation); /* it is not in the table any more */
void nvs_sim_pools_synchronized(sim_device *device);       /* after a wait for a stream, an event or a context */

/* graph_memory.c */
CUresult nvs_sim_graph_memory_new(sim_context *context, size_t bytes, sim_graph_memory **out); /* of one node; uses no memory of the card */
CUdeviceptr nvs_sim_graph_memory_pointer(const sim_graph_memory *memory);
sim_graph_memory *nvs_sim_graph_memory_at(CUdeviceptr pointer); /* NULL: no graph's */
void nvs_sim_graph_memory_ref(sim_graph_memory *memory); /* by one node more, or less */
void nvs_sim_graph_memory_unref(sim_graph_memory *memory);
bool nvs_sim_graph_memory_free(sim_graph_memory *memory);            /* false: no launch has allocated it since the last free */
void nvs_sim_graph_memory_gone(const sim_allocation *allocation);    /* its address is not in the table any more */
void nvs_sim_graph_context_gone(sim_device *device);

/* vmm.c */
bool nvs_sim_vmm_reserved(uintptr_t address, size_t bytes, bool *accessible);

/* module.c */
enum sim_image { IMAGE_CUBIN, IMAGE_PTX, IMAGE_FATBIN };
typedef struct sim_module { /* also a CUlibrary */
    uint32_t magic;
    struct sim_module *next; /* of the context */
    sim_context *context;    /* NULL for a library */
    enum sim_image kind;
    char *image;
    size_t bytes;
    struct sim_function *functions;
    struct sim_global *globals;
} sim_module;
typedef struct sim_function {
    uint32_t magic;
    struct sim_function *next;
    struct sim_module *module;
    char *name;
    bool busy; /* nvs_busy: its first parameter is its duration */
    bool copies; /* nvs_copy: copies words of 4 bytes; its parameters are target, source and their number */
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
} sim_function;
CUresult nvs_sim_function_named(sim_module *module, const char *name, size_t length, sim_function **out);
CUresult nvs_sim_module_list(sim_module *module, size_t *count);
void nvs_sim_module_free(sim_module *module);
void nvs_sim_globals_free(sim_module *module);
CUresult nvs_sim_read_file(const char *path, char **out);
void nvs_sim_modules_unload(sim_context *context);
CUresult nvs_sim_module_from_image(const void *image, struct sim_module **out);
CUresult nvs_sim_kernel_work(const CUDA_KERNEL_NODE_PARAMS *launch, sim_work *out);

/* capture.c */
CUresult nvs_sim_capture_unsafe(void);              /* a call that is not allowed while a capture is under way */
CUresult nvs_sim_capture_check(sim_stream *stream); /* synchronising or querying this stream */
CUresult nvs_sim_capture_implicit(sim_stream *stream); /* submitting to it: does the legacy stream join a capture? */
CUresult nvs_sim_capture_record(sim_stream *stream, sim_event *event, bool external);
CUresult nvs_sim_capture_wait(sim_stream *stream, sim_event *event, bool external, bool *handled);
CUresult nvs_sim_capture_add(sim_stream *stream, const sim_work *work);
bool nvs_sim_capture_context(sim_context *context); /* a stream of it is capturing; then those captures are invalid */
void nvs_sim_capture_context_gone(sim_context *context);

#define NVS_SIM_ENTER_RAW()                                                                      \
    do {                                                                                         \
        CUresult entered = nvs_sim_enter(__func__, false);                                       \
        if (entered != CUDA_SUCCESS)                                                             \
            return entered;                                                                      \
    } while (0)
#define NVS_SIM_ENTER()                                                                          \
    do {                                                                                         \
        CUresult entered = nvs_sim_enter(__func__, true);                                        \
        if (entered != CUDA_SUCCESS)                                                             \
            return entered;                                                                      \
    } while (0)
/* Also declares `context`, the current one. */
#define NVS_SIM_ENTER_CONTEXT()                                                                  \
    NVS_SIM_ENTER();                                                                             \
    sim_context *context = nvs_sim_current();                                                    \
    if (context == NULL)                                                                         \
        return nvs_sim_return(nvs_sim_no_context())
#define NVS_SIM_CHECK(condition, result)                                                         \
    do {                                                                                         \
        if (!(condition))                                                                        \
            return nvs_sim_return(result);                                                       \
    } while (0)
#define NVS_SIM_TRY(expression)                                                                  \
    do {                                                                                         \
        CUresult tried = (expression);                                                           \
        if (tried != CUDA_SUCCESS)                                                               \
            return nvs_sim_return(tried);                                                        \
    } while (0)

static inline CUresult nvs_sim_return(CUresult result)
{
    nvs_sim_leave();
    return result;
}

#endif
