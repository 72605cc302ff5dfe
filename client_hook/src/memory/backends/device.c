/* Memory mode `device`: memory of the driver, which is only charged and does not move. */
#include "driver/cuda_api.h"
#include "memory/backends/backend.h"

static CUresult allocate(uint32_t gpu, CUdeviceptr *out, size_t bytes, void **kept)
{
    return NVS_REAL(cuMemAlloc_v2)(out, bytes);
}

static CUresult release(uint32_t gpu, CUdeviceptr pointer, size_t bytes, void *kept)
{
    return NVS_REAL(cuMemFree_v2)(pointer);
}

static nvs_status move_nothing(uint32_t gpu, bool out, uint64_t bytes, const nvs_watch *watch, uint64_t *moved_bytes)
{
    *moved_bytes = 0; /* all of it is pinned, as the coordinator knows from the reports */
    return NVS_OK;
}

const nvs_backend nvs_backend_device = {
    .kind = NVS_MEMORY_REAL,
    .movable = false,
    .allocate = allocate,
    .release = release,
    .move = move_nothing,
};
