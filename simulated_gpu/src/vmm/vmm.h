/* Physical memory: handles for mappings, in one or several processes. */
#ifndef SIM_VMM_H
#define SIM_VMM_H

#include "memory/memory.h"

enum { SIM_GRANULARITY = 2 << 20 };

typedef struct sim_physical { /* a handle of cuMemCreate */
    uint32_t magic;
    uint32_t references, mappings;
    size_t bytes;
    int file;
    sim_device *device; /* NULL: in host memory */
    bool charged, imported;
    CUmemAllocationProp properties;
} sim_physical;

/* The process that is charged for shared memory.  The file holds this record behind the memory. */
typedef struct sim_charge_record {
    int32_t process; /* 0: none */
    uint32_t gpu;
} sim_charge_record;
enum { SIM_CHARGE_RECORD_BYTES = 4096 }; /* reserved in the file for the record */

CUresult nvs_sim_physical(CUmemGenericAllocationHandle handle, sim_physical **out);
void nvs_sim_physical_free_unused(sim_physical *physical); /* frees a handle without references and mappings */
bool nvs_sim_charge_record_write(int file, size_t bytes, int32_t process, uint32_t gpu);

#endif
