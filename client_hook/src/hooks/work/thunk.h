/* Gates in front of functions of unknown signature. */
#ifndef NVS_THUNK_H
#define NVS_THUNK_H

/* `target` itself when no thunk is left. */
void *nvs_thunk_make(const char *name, void *target);

#endif
