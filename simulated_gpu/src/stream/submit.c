/* Submission of work to a stream, and waits for it. */
#include "stream/stream.h"

void nvs_sim_stream_wait(sim_stream *stream)
{
    const uint64_t last = stream->queue.tail != NULL ? stream->queue.tail->sequence : 0, id = stream->id;
    while (stream->magic == SIM_STREAM && stream->id == id && stream->queue.head != NULL && stream->queue.head->sequence <= last)
        pthread_cond_wait(&nvs_sim_done, &nvs_sim_lock);
}

void nvs_sim_device_wait(sim_device *device)
{
    for (sim_context *context = device->contexts; context != NULL; context = context->next)
        nvs_sim_context_wait(context, NULL);
}

CUresult nvs_sim_submit(sim_stream *stream, const sim_work *work)
{
    if (stream->capture.of != NULL)
        return nvs_sim_stream_hooks.capture_work(stream, work);
    NVS_SIM_TRY(nvs_sim_capture_implicit(stream));
    return nvs_sim_enqueue(stream, work, work->kind == OP_KERNEL, false);
}
