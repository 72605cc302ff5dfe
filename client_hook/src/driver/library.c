/* See library.h. */
#define _GNU_SOURCE /* RTLD_NEXT */
#include "driver/library.h"

#include "driver/libc_symbols.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>

static _Atomic(void *) driver; /* handle of libcuda.so.1; never closed, so the driver stays loaded */

static void *driver_handle(void)
{
    /* Relaxed: an opaque word; every thread stores the same value. */
    void *handle = atomic_load_explicit(&driver, memory_order_relaxed);
    if (handle != NULL)
        return handle;
    handle = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    if (handle == NULL)
        dlerror(); /* clears the hook's error, not the application's */
    else
        atomic_store_explicit(&driver, handle, memory_order_relaxed);
    return handle;
}

bool nvs_driver_loaded(void)
{
    return driver_handle() != NULL;
}

void *nvs_driver_symbol(const char *name)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    if (real == NULL)
        return NULL;
    void *handle = driver_handle();
    /* Without libcuda.so.1, searches the libraries after the hook: a driver may have another name. */
    void *address = real(handle != NULL ? handle : RTLD_NEXT, name);
    if (address == NULL)
        dlerror();
    return address;
}
