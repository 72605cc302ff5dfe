/* Copies, fills and arrays. */
#ifndef SIM_COPY_H
#define SIM_COPY_H

#include "memory/memory.h"

#define SIM_POINTER(value) ((void *)(uintptr_t)(value)) /* from a CUdeviceptr or a pointer to const */

typedef struct sim_array { /* kept row by row in host memory, and charged as device memory */
    uint32_t magic;
    size_t element, pitch, rows;
    sim_context *context;
    CUdeviceptr memory;
} sim_array;

enum sim_waiting { SIM_NEVER_WAIT, SIM_ALWAYS_WAIT, SIM_WAIT_AS_ASYNC }; /* the last one waits only for pageable memory */

/* Bytes from the first to the last one of a block. */
static inline size_t nvs_sim_span(size_t width, size_t height, size_t depth, size_t pitch, size_t slice)
{
    return width == 0 || height == 0 || depth == 0 ? 0 : (depth - 1) * slice + (height - 1) * pitch + width;
}

static inline size_t nvs_sim_fill_span(const sim_fill *fill)
{
    return nvs_sim_span(fill->width * fill->element, fill->height, 1, fill->pitch, 0);
}

/* effect.c */
CUresult nvs_sim_effect(sim_stream *stream, const sim_work *work);

/* submit_copy.c */
bool nvs_sim_copy_allowed(const sim_copy *copy); /* both ends are accessible */
bool nvs_sim_pageable(const void *pointer);
CUresult nvs_sim_copy_stream(CUstream handle, bool asynchronous, sim_stream **out); /* checks that a capture allows the call */
CUresult nvs_sim_copy_submit(sim_stream *stream, sim_copy *copy, enum sim_waiting waiting);

/* array.c */
CUresult nvs_sim_array(CUarray handle, sim_array **out);

/* shape.c */
CUresult nvs_sim_copy_work(const CUDA_MEMCPY3D *shape, const sim_device *rights, sim_work *out);
CUresult nvs_sim_copy_3d(const CUDA_MEMCPY3D *shape, CUstream handle, bool asynchronous);

/* fill.c */
CUresult nvs_sim_fill_work(const CUDA_MEMSET_NODE_PARAMS *params, const sim_device *rights, sim_work *out);

#endif
