/* Waits that defer cancellation: a cancelled thread of the application ends after them.
 *
 * Waits, reads and writes are cancellation points.  A thread that ended in the hook would leave a lock or a half-made change behind, for which other
 * threads wait for ever.
 */
#ifndef NVS_CANCEL_H
#define NVS_CANCEL_H

#include <pthread.h>
#include <stdint.h>
#include <time.h>

/* Disables cancellation until nvs_cancel_allow, which takes this result. */
static inline int nvs_cancel_defer(void)
{
    int before;
    (void)pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    return before;
}

static inline void nvs_cancel_allow(int before)
{
    (void)pthread_setcancelstate(before, &before);
}

/* So long from now, by the clock of pthread_cond_timedwait. */
static inline struct timespec nvs_wait_until(uint64_t length_ns)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    const uint64_t end_ns = (uint64_t)now.tv_nsec + length_ns;
    return (struct timespec){now.tv_sec + (time_t)(end_ns / 1000000000u), (long)(end_ns % 1000000000u)};
}

/* As pthread_cond_wait, or pthread_cond_timedwait where `until` is not NULL. */
static inline int nvs_cond_wait(pthread_cond_t *changed, pthread_mutex_t *lock, const struct timespec *until)
{
    const int before = nvs_cancel_defer();
    const int result = until != NULL ? pthread_cond_timedwait(changed, lock, until) : pthread_cond_wait(changed, lock);
    nvs_cancel_allow(before);
    return result;
}

/* Sleeps; less than a second. */
static inline void nvs_nap(long length_ns)
{
    const struct timespec length = {0, length_ns};
    const int before = nvs_cancel_defer();
    (void)nanosleep(&length, NULL);
    nvs_cancel_allow(before);
}

#endif
