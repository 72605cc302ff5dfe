/* See gpu_cache.h. */
#include "contexts/gpu_cache.h"

_Atomic uint32_t nvs_gpu_generation = 1;
_Thread_local nvs_gpu_cache nvs_cached_gpu __attribute__((tls_model("initial-exec")));

void nvs_gpus_outdated(void)
{
    atomic_fetch_add_explicit(&nvs_gpu_generation, 1, memory_order_release); /* pairs with the acquire loads in which_gpu.c and which_gpu.h */
}
