/* Copies, fills and arrays: the many forms of the interface become one description each. */
#ifndef SIM_COPY_H
#define SIM_COPY_H

#include "memory/memory.h"

#define SIM_POINTER(value) ((void *)(uintptr_t)(value)) /* of a CUdeviceptr, or without const */

typedef struct sim_array { /* kept row by row in host memory, and charged as device memory */
    uint32_t magic;
    CUDA_ARRAY3D_DESCRIPTOR shape;
    size_t element, pitch, rows;
    sim_context *context;
    CUdeviceptr memory;
} sim_array;

enum sim_waiting { SIM_NEVER_WAIT, SIM_ALWAYS_WAIT, SIM_WAIT_AS_ASYNC }; /* the last: only where pageable memory demands it */

/* Bytes from the first to the last. */
static inline size_t nvs_sim_span(size_t width, size_t height, size_t depth, size_t pitch, size_t slice)
{
    return width == 0 || height == 0 || depth == 0 ? 0 : (depth - 1) * slice + (height - 1) * pitch + width;
}

/* effect.c */
CUresult nvs_sim_effect(sim_stream *stream, const sim_work *work);

/* submit_copy.c */
bool nvs_sim_copy_allowed(const sim_copy *copy); /* its GPUs have access to both ends */
bool nvs_sim_pageable(const void *pointer);
CUresult nvs_sim_copy_stream(CUstream handle, bool asynchronous, sim_stream **out); /* and whether a capture allows the call */
CUresult nvs_sim_copy_submit(sim_stream *stream, sim_copy *copy, enum sim_waiting waiting);

/* array.c */
CUresult nvs_sim_array(CUarray handle, sim_array **out);

/* shape.c */
CUresult nvs_sim_copy_from_3d(const CUDA_MEMCPY3D *shape, sim_copy *out);
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *by, sim_work *out);
CUresult nvs_sim_copy_3d(const CUDA_MEMCPY3D *shape, CUstream handle, bool asynchronous);
void nvs_sim_copy_describe(const sim_copy *copy, CUDA_MEMCPY3D *out); /* a captured copy, as cuGraphMemcpyNodeGetParams shows it */

/* fill.c */
CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *by, sim_work *out);

#endif
