/* How the real functions are found, and how an application's own look-ups are answered.
 *
 * Caught: the PLT (our exported symbols come first), dlsym and dlvsym (resolve.c), cuGetProcAddress in both ABIs, and libraries
 * that are opened with RTLD_DEEPBIND (deepbind.c), but for what their constructors call.
 * Not caught, and cannot be from an interposed library: dlmopen into a new namespace, which loads a second libc and a second
 * libcuda that know nothing of a preload.
 */
#ifndef NVS_RESOLVE_H
#define NVS_RESOLVE_H

#include "base/base.h"

/* Is a CUDA driver loaded in this process?  Never loads one. */
bool nvs_driver_loaded(void);

/* The driver's own function; NULL when there is none.  Leaves no trace in dlerror(). */
void *nvs_driver_symbol(const char *name);

typedef void *nvs_dlsym_function(void *handle, const char *name);
typedef void *nvs_dlvsym_function(void *handle, const char *name, const char *version);

/* libc's own, found without dlsym; NULL only if libc is none that we know.  libc_symbols.c */
nvs_dlsym_function *nvs_libc_dlsym(void);
nvs_dlvsym_function *nvs_libc_dlvsym(void);

#endif
