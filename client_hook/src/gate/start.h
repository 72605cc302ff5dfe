/* The start of the hook in a process. */
#ifndef NVS_START_H
#define NVS_START_H

/* Reads the environment and arms the gates; idempotent.  The constructor calls it, and entry points that another library's constructor may call first. */
void nvs_start(void);

#endif
