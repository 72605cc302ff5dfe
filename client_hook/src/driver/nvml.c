/* NVML's real functions.  See nvml.h. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "driver/nvml.h"

#include "driver/library.h"

#include <dlfcn.h>
#include <errno.h>
#include <string.h>

static const char *const names[NVS_NVML_COUNT] = {
#define NVS_NVML(symbol, parameters, arguments, change) #symbol,
#include "driver/nvml_api.def"
};

nvs_nvml_id nvs_nvml_id_of_name(const char *name)
{
    for (unsigned id = 0; id < NVS_NVML_COUNT; id++)
        if (strcmp(names[id], name) == 0)
            return (nvs_nvml_id)id;
    return NVS_NVML_COUNT;
}

/* Closes the handle at once, so that an application can unload NVML. */
void *nvs_nvml_symbol(const char *name)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    if (real == NULL)
        return NULL;
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (library == NULL)
        dlerror(); /* clears the hook's error, not the application's */
    void *address = real(library != NULL ? library : RTLD_NEXT, name);
    if (address == NULL)
        dlerror();
    if (library != NULL)
        dlclose(library);
    return address;
}

/* Not cached, unlike the driver's: NVML may have been unloaded and loaded at another address.  Its calls are slow beside a look-up. */
void *nvs_nvml_real(nvs_nvml_id id)
{
    int saved = errno;
    void *address = nvs_nvml_symbol(names[id]);
    errno = saved;
    return address;
}

bool nvs_nvml_found(nvs_nvml_id id, void *handle)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    void *address = real != NULL ? real(handle, names[id]) : NULL;
    return address != NULL && address == nvs_nvml_symbol(names[id]);
}
