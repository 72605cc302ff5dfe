/* See mode.h. */
#include "memory/backends/mode.h"

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "contexts/context.h"

const nvs_backend *nvs_memory_backend(uint32_t gpu)
{
    if (nvs_config.memory_mode == NVS_MODE_DEVICE)
        return &nvs_backend_device;
    if (nvs_config.memory_mode == NVS_MODE_SWAP) {
        if (nvs_memory_chunked->works(gpu))
            return nvs_memory_chunked;
        NVS_LOG_ONCE(NVS_LOG_WARNING, "this GPU has no virtual memory management, which --memory swap needs: using managed");
    }
    if (nvs_backend_managed_works(gpu))
        return &nvs_backend_managed;
    NVS_LOG_ONCE(NVS_LOG_WARNING,
                 "this GPU cannot move managed memory while it is in use: allocations stay on the device, as with --memory device");
    return &nvs_backend_device;
}

bool nvs_memory_manages(uint32_t gpu)
{
    if (!nvs_config.enabled)
        return false;
    nvs_context_learn();
    if (!nvs_context_possible(gpu))
        return false; /* the driver refuses the call */
    nvs_coordinator.attach(gpu);
    return true;
}
