/* The CUDA driver that this process has loaded.  Never loads one. */
#ifndef NVS_LIBRARY_H
#define NVS_LIBRARY_H

#include <stdbool.h>

bool nvs_driver_loaded(void);
void *nvs_driver_symbol(const char *name); /* the driver's own function; NULL: none.  Leaves no trace in dlerror() */

#endif
