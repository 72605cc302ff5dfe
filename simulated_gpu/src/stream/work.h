/* The work of a queued operation or a graph node. */
#ifndef SIM_WORK_H
#define SIM_WORK_H

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
    const char *symbol;
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

typedef struct sim_value_write {
    CUdeviceptr pointer;
    uint64_t value;
    uint32_t bytes;
} sim_value_write;

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
        sim_value_write write;
    } u;
} sim_work;

uint64_t nvs_sim_copy_ns(uint64_t bytes);
sim_fence *nvs_sim_fence_new(void);
void nvs_sim_fence_unref(sim_fence *fence);
void nvs_sim_discard(sim_work *work); /* frees the owned parts */

#endif
