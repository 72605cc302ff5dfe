/* Work that names the memory it uses, and may run on another GPU than that memory's: before it is submitted, memory in chunks has to be
 * there, and those who work on it need rights.
 *
 * A lease and a drain are of one GPU (swap/rights.c), so memory that meets another GPU stays on its card from then on.  nvs_meet and its kin are
 * called before the gate is entered, and wait for the other GPU's lease, once.  What they are given is the application's: a shape may be NULL.
 *
 * Memory that another program exported is mapped for one GPU, whatever the mode, and gets rights too.
 *
 * May not go here: kernels, which name nothing; they reach other GPUs by rights that they were given before.
 */
#ifndef NVS_MEET_H
#define NVS_MEET_H

#include "base/config.h"
#include "base/hot.h"
#include "ipc/ipc.h"

#include <stdatomic.h>

/* Is there memory that may be met, as far as the modes say? */
static inline bool nvs_meets(void)
{
    return (nvs_config.enabled && nvs_config.memory_mode == NVS_MODE_SWAP) ||
           atomic_load_explicit(&nvs_hot.imports, memory_order_relaxed) != 0; /* see base/hot.h */
}

/* What they return. */
enum {
    NVS_MOVES = 1u, /* some of the memory is `gpu`'s own and moves with its turns: who looks at addresses must stand in the gate */
    NVS_APART = 2u, /* GPUs that take part cannot be given rights to the memory: see nvs_around */
};

unsigned nvs_meet(uint32_t gpu, CUdeviceptr one, CUdeviceptr other); /* 0: no such memory */
unsigned nvs_meet_list(uint32_t gpu, const CUdeviceptr *targets, const CUdeviceptr *sources, size_t count);
unsigned nvs_meet_2d(uint32_t gpu, const CUDA_MEMCPY2D *shape);
unsigned nvs_meet_3d(uint32_t gpu, const CUDA_MEMCPY3D *shape);
unsigned nvs_meet_peer(uint32_t gpu, const CUDA_MEMCPY3D_PEER *shape);
unsigned nvs_meet_shapes(uint32_t gpu, const CUDA_MEMCPY3D_BATCH_OP *list, size_t count);
unsigned nvs_meet_values(uint32_t gpu, const CUstreamBatchMemOpParams *list, size_t count);

/* A copy or fill that met memory it has no rights to.  Any member but `stream` may be 0. */
typedef struct nvs_apart {
    CUstream stream;
    bool per_thread; /* a null stream means the per-thread default stream */
    bool waits;      /* the call names no stream */
    CUdeviceptr to, from;
    size_t bytes;
    const CUdeviceptr *targets, *sources;
    const size_t *sizes;
    size_t count;
    const CUDA_MEMCPY2D *flat;
    const CUDA_MEMCPY3D *solid;
    const CUDA_MEMCPY3D_BATCH_OP *shapes; /* `count` of them, or of the pairs above */
} nvs_apart;

typedef enum nvs_way {
    NVS_NO_WAY,   /* the driver's answer stands */
    NVS_WENT,     /* it is done, with a result */
    NVS_BORROWED, /* the call itself may be made now, and nvs_give_back after it */
} nvs_way;

/* In the gate.  The driver copies its own memory between any GPUs; memory in chunks only where the call names a context for each end.
 * So it is made one that does, or made in the context of the memory's GPU.  peer_copy.c */
nvs_way nvs_around(const nvs_apart *what, CUresult *result);
void nvs_give_back(void);

#endif
