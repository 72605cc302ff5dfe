/* A thread is cancelled while it waits under a lock, as an application's may be in the hook: with and without a deadline, and in a nap. */
#include "base/system.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static bool waiting, over;
static atomic_bool past;

static void *wait_once(void *argument)
{
    struct timespec until = {0, 0};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 3600;
    pthread_mutex_lock(&lock);
    waiting = true;
    while (!over)
        (void)nvs_cond_wait(&changed, &lock, argument != NULL ? &until : NULL);
    pthread_mutex_unlock(&lock);
    atomic_store(&past, true);
    pthread_testcancel();
    return NULL;
}

static void *nap_once(void *argument)
{
    (void)argument;
    nvs_nap(1);
    atomic_store(&past, true);
    pthread_testcancel();
    return NULL;
}

static bool ends_cancelled(pthread_t thread)
{
    void *result = NULL;
    return pthread_join(thread, &result) == 0 && result == PTHREAD_CANCELED && atomic_exchange(&past, false);
}

static void *start_cancelled(void *role(void *))
{
    int before;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before);
    pthread_cancel(pthread_self()); /* pending */
    pthread_setcancelstate(before, &before);
    return role(NULL);
}

static void *nap_cancelled(void *argument)
{
    (void)argument;
    return start_cancelled(nap_once);
}

int main(void)
{
    pthread_t thread;
    for (int timed = 0; timed < 2; timed++) {
        waiting = over = false;
        if (pthread_create(&thread, NULL, wait_once, timed ? &lock : NULL) != 0)
            return 2;
        for (bool there = false; !there;) { /* the lock is free and the thread is past its beginning: it waits */
            pthread_mutex_lock(&lock);
            there = waiting;
            pthread_mutex_unlock(&lock);
        }
        pthread_cancel(thread);
        pthread_mutex_lock(&lock);
        over = true;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
        if (!ends_cancelled(thread))
            return 3;
        if (pthread_mutex_trylock(&lock) != 0)
            return 4;
        pthread_mutex_unlock(&lock);
    }
    if (pthread_create(&thread, NULL, nap_cancelled, NULL) != 0 || !ends_cancelled(thread))
        return 5;
    puts("good");
    return 0;
}
