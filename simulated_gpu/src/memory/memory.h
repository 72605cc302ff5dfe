/* Memory: the table of addresses, and each kind of allocation. */
#ifndef SIM_MEMORY_H
#define SIM_MEMORY_H

#include "stream/stream.h"

#define SIM_HOST_BIT (1ull << 63) /* in accessed_by */
#define SIM_POINTER(value) ((void *)(uintptr_t)(value)) /* from a CUdeviceptr or a pointer to const */

enum sim_memory_kind { MEM_DEVICE, MEM_HOST, MEM_MANAGED, MEM_MAPPED, MEM_POOL, MEM_REGISTERED, MEM_IMPORTED, MEM_GRAPH };

struct sim_allocation;
typedef struct sim_account { /* of the object to which an allocation belongs */
    void *handle; /* MEM_MAPPED: the sim_physical (vmm.c); MEM_POOL: the pool; MEM_GRAPH: a sim_graph_memory */
    void (*released)(const struct sim_allocation *allocation); /* NULL, or called when the allocation has left the table */
    bool freed; /* the pool no longer counts it as used */
} sim_account;

typedef struct sim_ipc {
    int file;            /* of exported memory: its descriptor + 1 */
    int32_t process;     /* MEM_IMPORTED: the exporter, */
    uint64_t id;         /* the id of the allocation there, */
    uint32_t references; /* and the number of times it is open */
} sim_ipc;

typedef struct sim_allocation {
    uintptr_t base;
    size_t bytes;         /* as requested */
    size_t charged_bytes; /* on the device; of managed memory, the resident bytes */
    size_t mapped_bytes;  /* of host address space; 0: it came from malloc */
    enum sim_memory_kind kind;
    sim_device *device;
    sim_context *context;
    uint64_t id;
    bool sync_memops;
    uint64_t accessed_by; /* one bit per device; for mappings, pools and graph memory */
    sim_account account;
    sim_ipc ipc;
} sim_allocation;

typedef struct sim_graph_memory { /* the allocation of one graph node */
    struct sim_graph_memory *next; /* in the list of all */
    CUdeviceptr pointer;           /* 0: its context has ended */
    size_t bytes;
    sim_device *device;
    uint32_t nodes; /* that allocate it, including nodes of executables */
    bool live;      /* allocated by a launch, and not freed */
    bool orphan;    /* live, and its executable is destroyed */
} sim_graph_memory;

/* Bytes from the first to the last one of a block. */
static inline size_t nvs_sim_span(size_t width, size_t height, size_t depth, size_t pitch, size_t slice)
{
    return width == 0 || height == 0 || depth == 0 ? 0 : (depth - 1) * slice + (height - 1) * pitch + width;
}

static inline size_t nvs_sim_fill_span(const sim_fill *fill)
{
    return nvs_sim_span(fill->width * fill->element, fill->height, 1, fill->pitch, 0);
}

/* table.c */
sim_allocation *nvs_sim_find(uintptr_t address);         /* the allocation that contains the address; NULL: pageable host memory */
sim_allocation *nvs_sim_find_base(CUdeviceptr pointer);  /* the allocation that begins at the pointer, or NULL */
bool nvs_sim_overlaps(uintptr_t address, size_t bytes);
CUresult nvs_sim_insert(const sim_allocation *allocation);
void nvs_sim_remove(sim_allocation *allocation);
extern sim_allocation *nvs_sim_allocations; /* sorted by base, without overlaps */
extern size_t nvs_sim_allocation_count;
extern uint64_t nvs_sim_managed_count; /* of managed allocations */
CUresult nvs_sim_reserve(size_t bytes, size_t alignment, CUdeviceptr wanted, CUdeviceptr *out);
CUresult nvs_sim_unreserve(CUdeviceptr base, size_t bytes);
bool nvs_sim_reserved(uintptr_t address, size_t bytes);
/* Visits the mappings of a range until `visit` returns false.  Also false: the range has a hole or, with `whole`, covers a mapping
 * only in part. */
bool nvs_sim_each_mapping(uintptr_t address, size_t bytes, bool whole, bool (*visit)(sim_allocation *, uint64_t), uint64_t argument);
bool nvs_sim_accessible(uintptr_t address, size_t bytes); /* false: reserved but not mapped, or beyond the end of the allocation */

CUresult nvs_sim_allocate(sim_context *context, size_t bytes, enum sim_memory_kind kind, CUdeviceptr *out);
CUresult nvs_sim_release(uintptr_t base);

#define NVS_SIM_EACH_ALLOCATION(one)                                                            \
    for (sim_allocation *one = nvs_sim_allocations; one < nvs_sim_allocations + nvs_sim_allocation_count; one++)

/* peers.c */
bool nvs_sim_peers_possible(const sim_device *one, const sim_device *other);
bool nvs_sim_copy_reaches(const sim_device *by, uintptr_t address, size_t bytes); /* also false: not accessible at all */
bool nvs_sim_fill_reaches(const sim_context *by, uintptr_t address, size_t bytes);
bool nvs_sim_kernel_reaches(const sim_context *by, uintptr_t address, size_t bytes);

/* managed.c */
void nvs_sim_managed_touch(sim_device *device); /* a kernel has run */
void nvs_sim_managed_prefetch(CUdeviceptr pointer, size_t bytes, int32_t gpu);

/* vmm.c */
extern uint32_t nvs_sim_shared_physical; /* physical memory that was exported from here or imported here */

/* pool.c */
void nvs_sim_pools_synchronized(sim_device *device); /* after a wait for a stream, an event or a context */

/* effect.c */
CUresult nvs_sim_effect(sim_stream *stream, const sim_work *work); /* runs at the end of work; may drop the lock */
bool nvs_sim_copy_allowed(const sim_copy *copy);                   /* both ends are accessible */
bool nvs_sim_value_reached(const sim_stream *stream, const sim_value *wanted); /* also: it can no longer be */
void nvs_sim_transfers_wait(void);                                 /* until no effect moves bytes without the lock */

/* copy.c */
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *rights, sim_work *out);
CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *rights, sim_work *out);

/* graph/graph_memory.c */
CUresult nvs_sim_graph_memory_new(sim_context *context, size_t bytes, uint64_t accessors, sim_graph_memory **out); /* reserves an address */
sim_graph_memory *nvs_sim_graph_memory_at(CUdeviceptr pointer); /* NULL: no graph allocates it */
bool nvs_sim_graph_memory_free(sim_graph_memory *memory);       /* false: no launch has allocated it since the last free */
void nvs_sim_graph_memory_trim(sim_device *device);

/* Also declares `context`.  For calls that a capture forbids. */
#define NVS_SIM_ENTER_ALLOCATING()                                                              \
    NVS_SIM_ENTER_CONTEXT();                                                                    \
    NVS_SIM_TRY(nvs_sim_capture_unsafe());                                                      \
    NVS_SIM_TRY(context->error)

#endif
