/* Prepares the memory that a call names, which may be another GPU's: chunks must be on their GPU, and the GPUs that access them need rights.
 *
 * The driver checks copies and fills against its allocations, to the byte (measured on a driver 580).  Allocations in chunks share mappings, so they are
 * checked here.
 *
 * Memory of another GPU links the two GPUs (gate/gate.h): from then on the gate of one is open only while both leases are held, and all memory is there.
 * nvs_operands_prepare and its variants are called before the gate.  Their arguments are the application's: a shape may be NULL.
 *
 * Memory that another program has exported is mapped for one GPU, in every mode, and gets rights, too.
 *
 * Non-goals: kernels, which name no memory and need rights that were given before.
 */
#ifndef NVS_OPERANDS_H
#define NVS_OPERANDS_H

#include "base/config.h"
#include "base/hot.h"
#include "ipc/ipc.h"

#include <stdatomic.h>

/* True: calls of this process need the functions below. */
static inline bool nvs_operands_matter(void)
{
    return nvs_swapping() ||
           atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) != 0; /* see base/hot.h */
}

/* Results, by bit. */
enum {
    NVS_OPERANDS_MOVE = 1u, /* some of the memory moves with the leases of `gpu`: its addresses are valid inside the gate */
    NVS_OPERANDS_UNREACHABLE = 2u, /* a GPU cannot get rights to the memory: see nvs_peer_copy_try */
    NVS_OPERANDS_BEYOND = 4u, /* not within one allocation: the call is CUDA_ERROR_INVALID_VALUE */
};

typedef struct nvs_operand {
    CUdeviceptr address; /* 0: no memory */
    uint64_t bytes;      /* from the first to the last */
} nvs_operand;

unsigned nvs_operands_prepare(uint32_t gpu, nvs_operand one, nvs_operand other);
unsigned nvs_operands_prepare_list(uint32_t gpu, const CUdeviceptr *targets, const CUdeviceptr *sources, const size_t *sizes, size_t count);
unsigned nvs_operands_prepare_2d(uint32_t gpu, const CUDA_MEMCPY2D *shape);
unsigned nvs_operands_prepare_3d(uint32_t gpu, const CUDA_MEMCPY3D *shape);
unsigned nvs_operands_prepare_peer(uint32_t gpu, const CUDA_MEMCPY3D_PEER *shape);
unsigned nvs_operands_prepare_shapes(uint32_t gpu, const CUDA_MEMCPY3D_BATCH_OP *list, size_t count);
unsigned nvs_operands_prepare_values(uint32_t gpu, const CUstreamBatchMemOpParams *list, size_t count);

/* A linear copy or a fill that names memory which the calling GPU cannot reach. */
typedef struct nvs_peer_copy {
    CUstream stream;      /* by NVS_HANDLE */
    bool waits;           /* the call names no stream */
    CUdeviceptr to, from; /* 0: the call names no such memory */
    size_t bytes;
} nvs_peer_copy;

typedef enum nvs_peer_copy_outcome {
    NVS_COPY_DRIVER_ANSWERS, /* the caller makes the call unchanged; the driver refuses it */
    NVS_COPY_HANDLED,        /* the copy was made, with a result */
    NVS_COPY_CONTEXT_PUSHED, /* the caller makes the call unchanged, then calls nvs_peer_copy_pop */
} nvs_peer_copy_outcome;

/* In the gate.  Copies between two GPUs by a call that names a context for each end: only such a call works for memory in chunks without
 * peer access.  For a call without a stream that names memory of one GPU, pushes a context of that GPU.  operands.c */
nvs_peer_copy_outcome nvs_peer_copy_try(const nvs_peer_copy *what, CUresult *result);
void nvs_peer_copy_pop(void);

#endif
