/* The loaded libraries that the hook calls: libc's own dlsym and dlvsym, found without dlsym (NULL: an unknown libc), and the CUDA driver. */
#ifndef NVS_LIBRARY_H
#define NVS_LIBRARY_H

#include <stdbool.h>

typedef void *nvs_dlsym_function(void *handle, const char *name);
typedef void *nvs_dlvsym_function(void *handle, const char *name, const char *version);

nvs_dlsym_function *nvs_libc_dlsym(void);
nvs_dlvsym_function *nvs_libc_dlvsym(void);

bool nvs_driver_loaded(void);              /* loads none */
void *nvs_driver_symbol(const char *name); /* the driver's own function; NULL: none.  Leaves no trace in dlerror() */


/* The file of the CUDA driver that this address is in; NULL: none.  A process may have loaded several. */
const char *nvs_driver_file(const void *address);

#endif
