/* libc's own dlsym and dlvsym, found without dlsym.  NULL: an unknown libc. */
#ifndef NVS_LIBC_SYMBOLS_H
#define NVS_LIBC_SYMBOLS_H

typedef void *nvs_dlsym_function(void *handle, const char *name);
typedef void *nvs_dlvsym_function(void *handle, const char *name, const char *version);

nvs_dlsym_function *nvs_libc_dlsym(void);
nvs_dlvsym_function *nvs_libc_dlvsym(void);

#endif
