/* Devices, the contexts on them, the current context of each thread, and the use of a card by this process. */
#ifndef SIM_DEVICE_H
#define SIM_DEVICE_H

#include "entry/entry.h"

typedef struct sim_device sim_device;
typedef struct sim_context sim_context;
struct sim_stream; /* stream/stream.h */

typedef struct sim_storage { /* local storage that libcudart attaches to a context */
    struct sim_storage *next;
    void *key, *value;
    void (*destroy)(CUcontext, void *, void *);
} sim_storage;

typedef struct sim_context_settings { /* remembered only */
    unsigned flags;
    CUfunc_cache cache;
    CUsharedconfig shared_config;
    size_t limits[CU_LIMIT_MAX];
} sim_context_settings;

struct sim_context {
    uint32_t magic;
    sim_device *device;
    sim_context *next;
    bool primary;
    sim_context *owner; /* of a green context: the primary context, whose memory it uses */
    uint64_t id;
    uint32_t references; /* primary: retain count; made by cuCtxCreate: users beside the first */
    CUresult error;      /* sticky: ILLEGAL_ADDRESS and the like.  Only physical memory and its mappings can still be given back */
    uint64_t peers;      /* bit per visible device whose memory it has access to */
    sim_context_settings settings;
    struct {
        struct sim_stream *all, *legacy;
        struct sim_stream *graph; /* for graph nodes that run here but were launched on another GPU's stream; may be NULL */
    } streams;
    struct sim_module *modules;
    sim_storage *storage;
};

enum sim_figure { SIM_USED, SIM_USED_HIGH, SIM_RESERVED, SIM_RESERVED_HIGH, SIM_FIGURES };
typedef struct sim_figures { /* of a memory pool, or of a device's graph memory */
    uint64_t values[SIM_FIGURES];
} sim_figures;

struct sim_device {
    int ordinal;  /* CUdevice */
    uint32_t gpu; /* index in the shared file */
    uint64_t capacity_bytes;
    uint8_t uuid[16];
    bool instance; /* a MIG instance */
    sim_context primary;
    sim_context *contexts; /* all live ones, the primary context included */
    CUresult error;        /* of the first context with a sticky error: this process opens no more contexts here */
    struct {
        struct sim_stream *busy; /* streams that have work */
        bool started, asleep;
        uint64_t kernel_end_ns; /* of the kernel that ended last */
    } executor;
    struct {
        struct sim_pool *built_in, *current, *all;
    } pools;
    struct {
        sim_figures figures; /* used and reserved are both what the card has given to graphs */
        uint64_t attached;   /* of these, with executables or allocations */
    } graph_memory;
};

extern sim_device nvs_sim_devices[NVS_SIM_MAX_GPUS];
extern int nvs_sim_device_count;

/* devices.c */
void nvs_sim_find_devices(const nvs_sim_shared *shared); /* those that CUDA_VISIBLE_DEVICES names */
CUresult nvs_sim_device(CUdevice ordinal, sim_device **out);
sim_device *nvs_sim_device_of_gpu(uint32_t gpu); /* NULL: not visible */

/* charge.c */
nvs_sim_process *nvs_sim_self(void);                 /* its entry in the shared file; NULL: the table is full */
bool nvs_sim_registered(void);                       /* this process has a place in the shared file */
bool nvs_sim_charge(uint32_t gpu, uint64_t bytes);   /* false: no room, even after paging out managed memory of other processes */
void nvs_sim_uncharge(uint32_t gpu, uint64_t bytes);
uint64_t nvs_sim_page_in(uint32_t gpu, uint64_t bytes); /* managed memory: how many bytes found room */
void nvs_sim_page_out(uint32_t gpu, uint64_t bytes);
uint64_t nvs_sim_paged(uint32_t gpu); /* managed memory of this process that is still resident */
uint64_t nvs_sim_free(uint32_t gpu);
void nvs_sim_attach(uint32_t gpu, int change); /* counts contexts */
void nvs_sim_trace(uint32_t gpu, const nvs_sim_record *work); /* its start, end, work, stream, bytes and kind */

/* slices.c: with the shared lock, except where it says so */
uint64_t nvs_sim_clock_at(const sim_device *device, uint64_t real_ns); /* of this process's kernels; it stands outside its slices */
uint64_t nvs_sim_clock_end(const sim_device *device, uint64_t clock_ns); /* real time; UINT64_MAX: not in this slice, as things are */
bool nvs_sim_clock_covers(const sim_device *device, uint64_t clock_ns);
/* More of the GPU's time, until the clock is there, for work that could run from ready_ns on. */
void nvs_sim_claim(sim_device *device, uint64_t ready_ns, uint64_t clock_ns, uint64_t now_ns);
void nvs_sim_demand(sim_device *device, uint32_t demand, uint64_t now_ns); /* what the running kernels want; for clients of MPS */
uint64_t nvs_sim_next_look(sim_device *device, bool beyond, uint64_t now_ns); /* beyond: a kernel does not end in this slice */
uint32_t nvs_sim_wakes(const sim_device *device);  /* without the shared lock */
void nvs_sim_wake(sim_device *device);             /* the executor; without the shared lock */
void nvs_sim_sleep(sim_device *device, uint32_t wakes, uint64_t until_ns); /* until nvs_sim_wakes changes; drops nvs_sim_lock */

/* figures.c */
void nvs_sim_figures_set(sim_figures *figures, uint64_t used, uint64_t reserved); /* raises the high marks */
CUresult nvs_sim_figures_reset(sim_figures *figures, enum sim_figure high, const void *value); /* to the present; *value must be 0 */

/* current.c */
extern bool (*nvs_sim_reopen_primary)(sim_device *device); /* set by start.c: reopens a primary context after its reset */
sim_context *nvs_sim_current(void);
CUresult nvs_sim_no_context(void); /* why there is no current context */
CUresult nvs_sim_push(sim_context *context);
void nvs_sim_pop_if_current(const sim_context *context);
CUresult nvs_sim_context(CUcontext handle, sim_context **out); /* NULL: the current context */

/* Also declares `context`, the current one. */
#define NVS_SIM_ENTER_CONTEXT()                                                                 \
    NVS_SIM_ENTER();                                                                            \
    sim_context *context = nvs_sim_current();                                                   \
    if (context == NULL)                                                                        \
        return nvs_sim_no_context()

#endif
