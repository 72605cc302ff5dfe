/* The child of a fork: each part forgets what belongs to the parent.
 *
 * The handlers are registered when the agent begins: before that no GPU is known, so nothing has state that a child must lose.  None
 * allocates, or takes a lock that another thread may hold.  They write only to what the parent has written, and that stands together
 * (NVS_FORK_STATE): the kernel copies each page that they touch.
 */
#ifndef NVS_FORK_H
#define NVS_FORK_H

/* Run in the child in this order; NULL ends the list.  init.c */
extern void (*const nvs_fork_handlers[])(void) __attribute__((visibility("hidden")));

void nvs_fork_prepare(void); /* idempotent */

#endif
