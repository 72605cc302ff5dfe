/* See streams.h.
 *
 * The lock is not held during calls of the driver.  Entries never move: a visitor walks by index and takes the lock for each step.  It destroys a
 * stream that the application destroyed during the visit, so that it never queries a freed handle.
 */
#include "contexts/streams.h"

#include "contexts/context.h"
#include "contexts/gpu_cache.h"
#include "driver/cuda_api.h"

#include <pthread.h>

typedef struct stream_entry {
    CUstream stream; /* NULL: free */
    CUcontext context;
    uint32_t visitors;
    bool dead; /* destroyed during a visit, by the application or with its context (then NULL) */
} stream_entry;

NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static stream_entry *streams;
NVS_FORK_STATE static size_t stream_count;

void nvs_stream_created(CUstream stream, CUcontext context)
{
    pthread_mutex_lock(&lock);
    size_t place = stream_count;
    for (size_t i = stream_count; i-- > 0;)
        if (streams[i].stream == stream || streams[i].stream == NULL)
            place = i;
    if (place < stream_count || nvs_table_extend((void **)&streams, &stream_count, sizeof *streams))
        streams[place] = (stream_entry){.stream = stream, .context = context};
    pthread_mutex_unlock(&lock);
}

CUcontext nvs_stream_context(CUstream stream)
{
    CUcontext context = NULL;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].stream == stream)
            context = streams[i].context;
    pthread_mutex_unlock(&lock);
    return context;
}

bool nvs_stream_leaving(CUstream stream, CUcontext *context)
{
    bool destroy = true;
    *context = NULL;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].stream == stream) {
            *context = streams[i].context;
            if (streams[i].visitors != 0) {
                streams[i].dead = true;
                destroy = false;
            } else {
                streams[i].stream = NULL;
            }
        }
    pthread_mutex_unlock(&lock);
    nvs_gpus_outdated(); /* a stream of another GPU may get this handle */
    return destroy;
}

void nvs_streams_context_gone(CUcontext context)
{
    pthread_mutex_lock(&lock);
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].context == context) {
            if (streams[i].visitors == 0)
                streams[i].stream = NULL;
            else
                streams[i] = (stream_entry){streams[i].stream, NULL, streams[i].visitors, true};
        }
    pthread_mutex_unlock(&lock);
}

/* Destroys a stream that the application destroyed during a visit. */
static void destroy_now(CUstream stream, CUcontext context)
{
    CUcontext popped;
    const bool pushed = nvs_context_enter(context);
    NVS_REAL(cuStreamDestroy_v2)(stream);
    if (pushed)
        NVS_REAL(cuCtxPopCurrent_v2)(&popped);
}

void nvs_each_stream(CUcontext context, bool (*visit)(CUstream stream, void *argument), void *argument)
{
    bool go_on = true;
    pthread_mutex_lock(&lock);
    for (size_t i = 0; go_on && i < stream_count; i++) {
        const CUstream stream = streams[i].stream;
        if (stream == NULL || streams[i].context != context || streams[i].dead)
            continue;
        streams[i].visitors++;
        pthread_mutex_unlock(&lock);
        go_on = visit(stream, argument);
        pthread_mutex_lock(&lock);
        if (--streams[i].visitors == 0 && streams[i].dead) {
            const bool context_lives = streams[i].context != NULL;
            streams[i] = (stream_entry){0};
            pthread_mutex_unlock(&lock);
            if (context_lives)
                destroy_now(stream, context);
            pthread_mutex_lock(&lock);
        }
    }
    pthread_mutex_unlock(&lock);
}

NVS_FORK_CODE void nvs_streams_after_fork(void)
{
    if (stream_count == 0)
        return;
    lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER; /* a thread that does not exist here may have held it */
    streams = NULL; /* not freed: another thread may have been inside realloc */
    stream_count = 0;
}
