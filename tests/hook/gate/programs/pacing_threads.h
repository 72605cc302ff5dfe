/* Scenarios of pacing_check.c, which includes this once: several threads, threads that end, contexts that end, and a fork. */

/* Threads in turns, one submission each, so that the order is the same each time. */
static pthread_mutex_t turn_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static unsigned turn;

static void *one_of_them(void *argument)
{
    const unsigned self = (unsigned)(uintptr_t)argument;
    for (unsigned i = 0; i < 20000; i++) {
        pthread_mutex_lock(&turn_lock);
        while (turn != self)
            pthread_cond_wait(&turned, &turn_lock);
        submit(self, 20000, false);
        turn = (turn + 1) % STREAMS;
        pthread_cond_broadcast(&turned);
        pthread_mutex_unlock(&turn_lock);
    }
    return NULL;
}

static void threads(bool paced)
{
    pthread_t all[STREAMS];
    begin(paced ? 10 * MS : 0, paced);
    for (unsigned i = 0; i < STREAMS; i++)
        MUST(pthread_create(&all[i], NULL, one_of_them, (void *)(uintptr_t)i) == 0);
    for (unsigned i = 0; i < STREAMS; i++)
        MUST(pthread_join(all[i], NULL) == 0);
    MUST(model.most_pending_ns <= 10 * MS);
}

enum { MOST_EVENTS = 17 }; /* of a thread on one stream: NVS_PACE_RING and the last one that was done */

static void *some_work(void *argument)
{
    for (unsigned i = 0; i < 64; i++)
        submit((unsigned)(uintptr_t)argument, 1000, false);
    return NULL;
}

static void one_thread(unsigned stream)
{
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, some_work, (void *)(uintptr_t)stream) == 0 && pthread_join(thread, NULL) == 0);
}

/* One after the other: no more events than a few threads need. */
static void ended(bool paced)
{
    begin(paced ? 10 * MS : 0, paced);
    contexts[0] = first_context;
    for (unsigned i = 0; i < 200; i++) {
        one_thread(i % 2 == 0 ? 0 : DEFAULT_STREAM);
        MUST(model.events != 0 && model.events <= 4 * MOST_EVENTS);
    }
    for (unsigned i = 0; i < 400 && model.events > MOST_EVENTS; i++)
        submit(0, 1000, false);
    MUST(model.events <= MOST_EVENTS);
}

/* Ends the second context as the hook does: what it takes with it may not be touched any more (AddressSanitizer). */
static void end_second(CUevent *of_it, unsigned count)
{
    nvs_pacing_context_gone(second_context);
    contexts[1] = NULL;
    for (unsigned i = 0; i < count; i++) {
        free(of_it[i]);
        model.events--;
    }
    nvs_pacing_context_gone(second_context);
}

static CUevent made[64];
static unsigned made_count;

static CUresult event_create_noted(CUevent *event, unsigned int flags)
{
    const CUresult result = event_create(event, flags);
    MUST(made_count < sizeof made / sizeof *made);
    made[made_count++] = *event;
    return result;
}

/* A thread had events in two contexts, of which one ends, and another one gets its handle: the events of the other one are
 * destroyed, those of the ended one are not.  `late`: the context ends before the thread does. */
static void *work_in_both(void *argument)
{
    bool *const late = argument;
    some_work((void *)(uintptr_t)0);
    atomic_store_explicit(&nvs_reals[NVS_ID_cuEventCreate], (nvs_function)event_create_noted, memory_order_relaxed);
    some_work((void *)(uintptr_t)1);
    atomic_store_explicit(&nvs_reals[NVS_ID_cuEventCreate], (nvs_function)event_create, memory_order_relaxed);
    if (*late)
        end_second(made, made_count);
    return NULL;
}

static void ended_context(bool late)
{
    pthread_t thread;
    begin(10 * MS, true);
    contexts[0] = first_context;
    contexts[1] = model.streams[1].context = second_context;
    MUST(pthread_create(&thread, NULL, work_in_both, &late) == 0 && pthread_join(thread, NULL) == 0);
    if (!late)
        end_second(made, made_count);
    const unsigned left = model.events;
    MUST(made_count != 0 && left != 0);
    contexts[1] = second_context;
    for (unsigned i = 0; i < 64; i++)
        submit(2, 1000, false);
    MUST(model.destroyed == left);
}

/* In a child: what its only thread had is forgotten without a call of the driver. */
static void *work_and_fork(void *argument)
{
    some_work(argument);
    nvs_pacing_after_fork();
    nvs_pacing_set_budget(0, 10 * MS, 0);
    return NULL;
}

static void forked(void)
{
    pthread_t thread;
    begin(10 * MS, true);
    contexts[0] = first_context;
    one_thread(0);
    MUST(pthread_create(&thread, NULL, work_and_fork, NULL) == 0 && pthread_join(thread, NULL) == 0);
    MUST(model.events != 0);
    model.destroyed = 0;
    some_work((void *)(uintptr_t)1);
    MUST(model.destroyed == 0);
}
