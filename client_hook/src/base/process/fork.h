/* The child of a fork: each part forgets what belongs to the parent.
 *
 * The handlers are registered when the agent starts: before, there is no state that a child must lose.  No handler allocates, or takes a lock.  They write
 * only to variables that the parent has written and that are together (NVS_FORK_STATE), since the kernel copies each page that they touch.
 */
#ifndef NVS_FORK_H
#define NVS_FORK_H

/* Run in the child in this order; NULL ends the list.  init.c */
extern void (*const nvs_fork_handlers[])(void) __attribute__((visibility("hidden")));

void nvs_fork_prepare(void); /* idempotent */

#endif
