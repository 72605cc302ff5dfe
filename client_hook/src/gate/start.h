/* The start of the hook in a process. */
#ifndef NVS_START_H
#define NVS_START_H

/* Reads the environment and arms the gates; the constructor's work, idempotent.  For entry points that another library's constructor
 * may reach before ours has run. */
void nvs_start(void);

#endif
