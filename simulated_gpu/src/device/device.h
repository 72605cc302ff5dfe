/* Devices, contexts, the current context of each thread, and the use of a card by this process. */
#ifndef SIM_DEVICE_H
#define SIM_DEVICE_H

#include "base/entry.h"

typedef struct sim_device sim_device;
typedef struct sim_context sim_context;
struct sim_stream; /* stream/stream.h */

typedef struct sim_storage { /* local storage that libcudart attaches to a context */
    struct sim_storage *next;
    void *key, *value;
    void (*destroy)(CUcontext, void *, void *);
} sim_storage;

typedef struct sim_context_settings { /* without effect */
    unsigned flags;
    size_t limits[CU_LIMIT_MAX];
} sim_context_settings;

typedef struct sim_context_streams {
    struct sim_stream *all, *legacy;
    struct sim_stream *graph; /* for graph nodes that run here but were launched on a stream of another GPU; may be NULL */
} sim_context_streams;

struct sim_context {
    uint32_t magic;
    sim_device *device;
    sim_context *next;
    sim_context *owner; /* of a green context: the primary context, whose memory it uses */
    uint64_t id;
    uint32_t references; /* primary: retain count; of cuCtxCreate: users in addition to the first */
    CUresult error;      /* sticky: ILLEGAL_ADDRESS and the like.  Only physical memory and its mappings can still be released */
    uint64_t peers;      /* one bit per visible device whose memory it can access */
    sim_context_settings settings;
    sim_context_streams streams;
    struct sim_module *modules;
    sim_storage *storage;
};

enum sim_figure { SIM_USED, SIM_USED_HIGH, SIM_RESERVED, SIM_RESERVED_HIGH, SIM_FIGURES };
typedef struct sim_figures { /* of a memory pool, or of a device's graph memory */
    uint64_t values[SIM_FIGURES];
} sim_figures;

typedef struct sim_executor {
    struct sim_stream *busy; /* streams with work */
    bool started, calls_started, asleep;
    uint64_t kernel_end_ns; /* of the kernel that ended last */
} sim_executor;

typedef struct sim_pools {
    struct sim_pool *built_in, *current, *all;
} sim_pools;

typedef struct sim_device_graph_memory {
    sim_figures figures; /* used and reserved: the memory that the card has given to graphs */
    uint64_t attached;   /* the part that executables or live allocations hold */
} sim_device_graph_memory;

struct sim_device {
    int ordinal;  /* CUdevice */
    uint32_t gpu; /* index in the shared file */
    uint32_t card; /* in its PCI address; a restoration on another GPU leaves it (driver 580) */
    uint64_t capacity_bytes;
    uint8_t uuid[16];
    bool instance; /* a MIG instance */
    sim_context primary;
    sim_context *contexts; /* all live contexts, including the primary one */
    CUresult error;        /* the first sticky error of a context: this process opens no more contexts here */
    sim_executor executor;
    sim_pools pools;
    sim_device_graph_memory graph_memory;
};

static inline bool nvs_sim_is_primary(const sim_context *context)
{
    return context->device != NULL && context == &context->device->primary;
}

extern sim_device nvs_sim_devices[NVS_SIM_MAX_GPUS];
extern int nvs_sim_device_count;

/* devices.c */
CUresult nvs_sim_state_open(void);   /* the file alone, for a process that has not called cuInit */
CUresult nvs_sim_devices_open(void); /* the state file, the entry of this process, and the devices */
void nvs_sim_device_place(sim_device *device, uint32_t gpu); /* the device is that GPU from now on */
CUresult nvs_sim_device(CUdevice ordinal, sim_device **out);
sim_device *nvs_sim_device_of_gpu(uint32_t gpu); /* NULL: not visible */

/* charge.c */
extern nvs_sim_process *nvs_sim_self;                /* the entry of this process in the shared file, from cuInit on */
bool nvs_sim_charge(uint32_t gpu, uint64_t bytes);   /* false: no room, even after managed memory was paged out */
void nvs_sim_uncharge(uint32_t gpu, uint64_t bytes);
uint64_t nvs_sim_page_in(uint32_t gpu, uint64_t bytes); /* managed memory: returns the bytes that found room */
void nvs_sim_page_out(uint32_t gpu, uint64_t bytes);
uint64_t nvs_sim_paged(uint32_t gpu); /* managed memory of this process that is still resident */
uint64_t nvs_sim_free(uint32_t gpu);
void nvs_sim_attach(uint32_t gpu, int change); /* counts contexts */
void nvs_sim_trace(uint32_t gpu, const nvs_sim_record *work); /* writes a record; `work` has start, end, work, stream, bytes and kind */
void nvs_sim_figures_set(sim_figures *figures, uint64_t used, uint64_t reserved); /* raises the high marks */
CUresult nvs_sim_figures_reset(sim_figures *figures, enum sim_figure high, const void *value); /* to the present value; *value must be 0 */

/* current.c */
CUresult nvs_sim_context_open(sim_context *context, sim_device *device, unsigned flags);
sim_context *nvs_sim_current(void);
CUresult nvs_sim_need_current(sim_context **out);
CUresult nvs_sim_push(sim_context *context);
void nvs_sim_pop_if_current(const sim_context *context);
CUresult nvs_sim_context(CUcontext handle, sim_context **out); /* NULL: the current context */

/* Also declares `context`, the current one. */
#define NVS_SIM_ENTER_CONTEXT() NVS_SIM_ENTER_FIND(sim_context *context, nvs_sim_need_current(&context))

#endif
