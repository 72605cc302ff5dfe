/* Host memory and the share of its budget, in a time that only we move: what is idle goes back, who does not answer sets no bound.
 *
 * The agent's and the pool's own code; the system, the connection and the clock are models.  One scenario a run, named by the argument.
 */
#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "contexts/context.h"
#include "coord/agent.h"
#include "coord/mailbox.h"
#include "coord/mover.h"
#include "coord/protocol/link.h"
#include "coord/state.h"
#include "driver/cuda_api.h"
#include "gate/gate.h"
#include "host/pool.h"
#include "host/system.h"

#include "must.h"

#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <string.h>
#include <time.h>

#define SECOND UINT64_C(1000000000)
enum { GRAINS = 8, BOUND_S = 60 };

static struct {
    _Atomic uint64_t now_ns, mapped_bytes, unmapped_bytes, waited_ns;
    _Atomic bool elapses; /* timed waits end now */
    _Atomic bool works;   /* the program submits work all the time */
    unsigned frames;
    char done[16];        /* m: memory was made, p: pinned */
    sem_t waits, mapped, pinned, unmapped; /* a timed wait has begun; memory was made, pinned; it has gone back */
} model = {.now_ns = 1000 * SECOND};

static void until(sem_t *happened)
{
    struct timespec end;
    clock_gettime(CLOCK_REALTIME, &end);
    end.tv_sec += BOUND_S;
    MUST(sem_timedwait(happened, &end) == 0);
}

/* ---- The clock ---- */

uint64_t nvs_now_ns(void) { return model.now_ns; }

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *end)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    model.waited_ns = (uint64_t)(end->tv_sec - now.tv_sec) * SECOND + (uint64_t)end->tv_nsec - (uint64_t)now.tv_nsec;
    sem_post(&model.waits);
    model.now_ns += model.elapses ? SECOND : 0;
    int result = model.elapses ? 0 : pthread_cond_wait(condition, mutex);
    return model.elapses ? ETIMEDOUT : result;
}

/* All that is waited for has come, until time stands still.  Waking who waits needs the pool's own broadcast. */
static void time_passes(void)
{
    model.elapses = true;
    MUST(nvs_host_reserve(0));
}

static void time_stands_still(void)
{
    model.elapses = false;
}

/* ---- What the hook's other parts would say ---- */

nvs_settings nvs_config = {.memory_mode = NVS_MODE_SWAP};
_Atomic(nvs_function) nvs_reals[NVS_ID_COUNT];

static void wait_for_lease(uint32_t gpu) { nvs_gate_open(gpu, false); }
const nvs_port nvs_coordinator = {.wait_for_lease = wait_for_lease, .reserve_host = nvs_agent_reserve_host};
void nvs_link_send(const uint8_t *frame, size_t size) { model.frames++; }
void nvs_mover_hold(uint32_t gpu) {}
int nvs_log_level;
void nvs_log(int level, const char *format, ...) {}
bool nvs_context_enter(CUcontext context) { return NVS_REAL(cuCtxPushCurrent_v2)(context) == CUDA_SUCCESS; }
CUresult nvs_context_error(void) { return CUDA_SUCCESS; }
uint64_t nvs_host_system_left(void) { return UINT64_MAX; }

int nvs_thread_start(pthread_t *thread, void *(*role)(void *), void *argument)
{
    pthread_t made;
    return pthread_create(&made, NULL, role, argument);
}

/* It takes a while, in which the program goes on. */
static void done(char what, sem_t *happened)
{
    model.done[strlen(model.done)] = what;
    model.now_ns += SECOND / 100;
    if (model.works)
        (void)nvs_gate_leave(nvs_gate_enter(0), 0);
    sem_post(happened);
}

bool nvs_each_context(uint32_t gpu, bool (*visit)(CUcontext context, void *argument), void *argument)
{
    done('p', &model.pinned);
    return true;
}

bool nvs_host_map(uint32_t gpu, size_t bytes, size_t alignment, bool gently, nvs_host_mapping *out)
{
    *out = (nvs_host_mapping){.memory = aligned_alloc(alignment, bytes), .raw_bytes = bytes};
    out->raw = out->memory;
    model.mapped_bytes += bytes;
    done('m', &model.mapped);
    return out->memory != NULL;
}

void nvs_host_unmap(const nvs_host_mapping *mapping)
{
    free(mapping->raw);
    model.unmapped_bytes += mapping->raw_bytes;
    sem_post(&model.unmapped);
}

static CUresult exchange_mode(CUstreamCaptureMode *mode) { return CUDA_SUCCESS; }

nvs_function nvs_real_resolve(nvs_id id)
{
    MUST(id == NVS_ID_cuThreadExchangeStreamCaptureMode);
    return (nvs_function)exchange_mode;
}

bool nvs_real_exists(nvs_id id) { return true; }

/* ---- Scenarios ---- */

static void take(void **out)
{
    nvs_host_prepare(0, GRAINS);
    MUST(nvs_host_take(0, GRAINS, out));
}

/* What has been unused for ten seconds goes back, but for what is to be ready; what is in use does not. */
static void idle(void)
{
    const uint64_t slab = GRAINS * NVS_HOST_GRAIN;
    void *first[GRAINS], *second[GRAINS];
    MUST(nvs_host_reserve(2 * slab));
    take(first);
    take(second);
    until(&model.mapped);
    until(&model.mapped);
    MUST(model.mapped_bytes == 2 * slab && model.unmapped_bytes == 0);
    nvs_host_ahead(0, slab, false);
    nvs_host_give(GRAINS, second);
    nvs_host_give(GRAINS, first);
    until(&model.waits);
    MUST(model.waited_ns > 9 * SECOND && model.waited_ns <= 10 * SECOND);
    MUST(model.unmapped_bytes == 0);
    time_passes();
    until(&model.unmapped);
    time_stands_still();
    nvs_host_ahead(0, 2 * slab, false);
    until(&model.mapped); /* half of that was there: what was to be ready had stayed */
    MUST(model.unmapped_bytes == slab && model.mapped_bytes == 3 * slab);
}

/* What is used again within the ten seconds stays. */
static void used_again(void)
{
    void *grains[GRAINS];
    MUST(nvs_host_reserve(GRAINS * NVS_HOST_GRAIN));
    take(grains);
    nvs_host_give(GRAINS, grains);
    until(&model.waits);
    take(grains);
    time_passes();
    time_stands_still();
    nvs_host_give(GRAINS, grains);
    until(&model.waits); /* it begins to count anew */
    MUST(model.unmapped_bytes == 0 && model.mapped_bytes == GRAINS * NVS_HOST_GRAIN);
}

/* While the program works, all is made before a piece is pinned, with a rest after each; an eviction pins what is there. */
static void ahead(void)
{
    enum { PIECE = 32 }; /* AHEAD_GRAINS of host/pool.c */
    static void *grains[PIECE];
    model.works = true;
    MUST(nvs_host_reserve(4 * PIECE * NVS_HOST_GRAIN));
    nvs_host_ahead(0, 3 * PIECE * NVS_HOST_GRAIN, false);
    until(&model.waits);
    MUST(strcmp(model.done, "m") == 0 && model.waited_ns <= SECOND / 100 && nvs_host_ready_bytes() == 0);
    nvs_host_prepare(0, PIECE);
    MUST(nvs_host_take(0, PIECE, grains));
    MUST(strncmp(model.done, "mp", 2) == 0); /* and no more was made for it */
    time_passes();
    until(&model.pinned);
    until(&model.pinned);
    until(&model.pinned);
    time_stands_still();
    MUST(strncmp(model.done, "mpmmp", 5) == 0);
}

/* While it does not work, there are no rests. */
static void ahead_of_an_idle_program(void)
{
    MUST(nvs_host_reserve(64 * NVS_HOST_GRAIN));
    nvs_host_ahead(0, 64 * NVS_HOST_GRAIN, false);
    until(&model.pinned);
    until(&model.pinned);
    MUST(strcmp(model.done, "mmpp") == 0 && sem_trywait(&model.waits) != 0);
}

/* A coordinator that says nothing for two seconds sets no bound, and what it says later is not heard. */
static void silent(void)
{
    uint64_t asked_ns = model.now_ns;
    nvs_budget_connected();
    MUST(model.frames == 1);
    MUST(!nvs_host_reserve(NVS_HOST_GRAIN)); /* it has a budget, and has given nothing yet */
    MUST(nvs_budget_serve(asked_ns) == asked_ns + 2 * SECOND);
    model.now_ns = asked_ns + 2 * SECOND - 1;
    MUST(nvs_budget_serve(model.now_ns) == asked_ns + 2 * SECOND);
    MUST(!nvs_host_reserve(NVS_HOST_GRAIN));
    model.now_ns = asked_ns + 2 * SECOND;
    MUST(nvs_budget_serve(model.now_ns) == UINT64_MAX);
    MUST(nvs_host_reserve(NVS_HOST_GRAIN));
    nvs_budget_received(&(nvs_target){.gpu = NVS_WIRE_HOST, .answers = 1, .total_bytes = 0});
    MUST(nvs_host_reserve(NVS_HOST_GRAIN));
}

/* One that answers in time is obeyed, also when it falls silent at a later question. */
static void answers(void)
{
    nvs_budget_connected();
    nvs_budget_received(&(nvs_target){.gpu = NVS_WIRE_HOST, .answers = 1, .total_bytes = NVS_HOST_STEP});
    MUST(nvs_budget_serve(model.now_ns) == UINT64_MAX);
    MUST(nvs_host_reserve(NVS_HOST_STEP));
    MUST(!nvs_host_reserve(NVS_HOST_GRAIN));
    nvs_states_lost();
    MUST(nvs_host_reserve(NVS_HOST_GRAIN)); /* nobody is there to be asked */
    nvs_budget_connected();
    MUST(model.frames == 2);
    MUST(!nvs_host_reserve(NVS_HOST_GRAIN)); /* the next one has not answered */
}

int main(int argc, char **argv)
{
    const char *what = argc == 2 ? argv[1] : "";
    sem_init(&model.waits, 0, 0);
    sem_init(&model.mapped, 0, 0);
    sem_init(&model.pinned, 0, 0);
    sem_init(&model.unmapped, 0, 0);
    nvs_gate_init();
    if (strcmp(what, "idle") == 0)
        idle();
    else if (strcmp(what, "used-again") == 0)
        used_again();
    else if (strcmp(what, "ahead") == 0)
        ahead();
    else if (strcmp(what, "ahead-idle") == 0)
        ahead_of_an_idle_program();
    else if (strcmp(what, "silent") == 0)
        silent();
    else if (strcmp(what, "answers") == 0)
        answers();
    else
        return 2;
    puts("good");
    fflush(stdout);
    _Exit(0); /* the pool's threads have no end */
}
