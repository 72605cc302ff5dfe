/* The bypass detector: a library that the driver loads into every CUDA process (CUDA_INJECTION64_PATH; reports.py).
 *
 * CUPTI tells it of the driver's calls and of the work that the GPU did.  On the calling thread it asks the hook whether the call is inside the gate
 * (nvshare_gate_depth).  Work is matched with its call by correlation id: of the driver's call, or of the runtime's call around it, as CUPTI uses the outermost.
 * What came outside of the gate is an escape.  The report is written at exit; what CUPTI refuses is its `problem`.
 *
 * CUPTI's declarations below are of every version from 11.8 to 13.5.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, RTLD_NOLOAD */
#include "base/base.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int InitializeInjection(void);

/* ---- CUPTI ---- */

enum { DRIVER = 1, RUNTIME = 2, ENTER = 0, FLUSH_FORCED = 1 }; /* CUpti_CallbackDomain, CUpti_ApiCallbackSite */
enum { COPY = 1, FILL = 2, KERNEL = 10, PEER_COPY = 22 };      /* CUpti_ActivityKind: the first four bytes of a record */
enum { KERNEL_NAME = 104 };                                    /* offset of a pointer that is valid until the buffer is freed */

static const struct {
    uint32_t kind;
    size_t correlation; /* offset in the record */
} records[] = {{KERNEL, 92}, {COPY, 44}, {FILL, 44}, {PEER_COPY, 60}};
enum { RECORD_KINDS = sizeof records / sizeof *records };

typedef struct call { /* CUpti_CallbackData */
    uint32_t site;
    const char *function; /* never freed */
    const void *parameters;
    void *returned;
    const char *symbol;
    void *context;
    uint32_t context_id;
    uint64_t *scratch;
    uint32_t correlation;
} call;

static int (*subscribe)(void **subscriber, void (*callback)(void *argument, uint32_t domain, uint32_t id, const call *call), void *argument);
static int (*enable_domain)(uint32_t enable, void *subscriber, uint32_t domain);
static int (*register_callbacks)(void (*want)(uint8_t **buffer, size_t *size, size_t *most_records),
                                 void (*full)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid_size));
static int (*enable)(uint32_t kind);
static int (*flush_all)(uint32_t flags);
static int (*next_record)(uint8_t *buffer, size_t valid_size, void **record);
static int (*dropped)(void *context, uint32_t stream, size_t *dropped);

/* ---- Calls ---- */

/* The class of a call.  Of several calls with one correlation id the highest class counts. */
typedef enum class { UNSEEN, OTHER, HOOK, GATED, ESCAPED } class;

static const struct {
    const char *name;
    class what; /* outside of the gate */
} table[] = {
#define NVS_STREAM(symbol, since, parameters, arguments, stream) {#symbol, ESCAPED},
#define NVS_CURRENT(symbol, since, parameters, arguments) {#symbol, ESCAPED},
#define NVS_CUSTOM(symbol, since) {#symbol, OTHER},
#define NVS_PASS(symbol, since, reason) {#symbol, OTHER},
#define NVS_THUNK(symbol, since, reason) {#symbol, ESCAPED},
#define NVS_FOREIGN(symbol, since, reason) {#symbol, OTHER},
#include "driver/cuda_api.def"
};

enum { RING = 1 << 22, MOST_ESCAPES = 512 };
static struct {
    uint32_t correlation;
    class what;
    const char *function;
} ring[RING]; /* of the newest calls, by correlation id */

static struct {
    const char *function;
    char *symbol; /* the kernel; "": none, or not known */
    unsigned ran;
} escapes[MOST_ESCAPES];
static unsigned escape_count, kernels, kernels_gated;
static size_t lost;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of all that is counted */

static uint32_t (*gate_depth)(void); /* of the hook; NULL: the hook is not in this process */
static int (*hook_active)(void);
static _Thread_local uint32_t runtime_correlation; /* of the runtime's call on this thread; 0: none */

static bool has_one_of(const char *name, const char *const *words, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strstr(name, words[i]) != NULL)
            return true;
    return false;
}

/* A query or a wait is unseen: polling would displace all other calls.  A function that is in no table goes by the words in its name. */
static class classify(const char *name)
{
    static const char *const work[] = {"Launch", "Memcpy", "Memset", "Prefetch"}, *const quiet[] = {"Query", "Get", "Synchronize", "EventRecord"};
    class found = UNSEEN;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].name, name) == 0)
            found = table[i].what;
    if (found != ESCAPED && has_one_of(name, quiet, 4))
        return UNSEEN;
    if (found == UNSEEN)
        found = has_one_of(name, work, 4) && strstr(name, "Node") == NULL ? ESCAPED : OTHER;
    return found;
}

static unsigned *ran_locked(const char *function, const char *symbol)
{
    unsigned at = 0;
    while (at < escape_count && (strcmp(escapes[at].function, function) != 0 || strcmp(escapes[at].symbol, symbol) != 0))
        at++;
    if (at == MOST_ESCAPES)
        return &escapes[0].ran;
    if (at == escape_count) {
        escapes[at].function = function;
        escapes[at].symbol = strdup(symbol);
        escape_count++;
    }
    return &escapes[at].ran;
}

static void on_call(void *argument, uint32_t domain, uint32_t id, const call *call)
{
    (void)argument, (void)id;
    if (domain == RUNTIME)
        runtime_correlation = call->site == ENTER ? call->correlation : 0;
    if (domain != DRIVER || call->site != ENTER || call->function == NULL)
        return;
    const uint32_t depth = gate_depth != NULL ? gate_depth() : 0, ids[] = {call->correlation, runtime_correlation};
    const class what = depth == UINT32_MAX ? HOOK : depth != 0 ? GATED : classify(call->function);
    pthread_mutex_lock(&lock);
    for (int i = 0; i < 2 && what != UNSEEN; i++)
        if (ids[i] != 0 && (ring[ids[i] % RING].correlation != ids[i] || ring[ids[i] % RING].what < what)) {
            ring[ids[i] % RING].correlation = ids[i];
            ring[ids[i] % RING].what = what;
            ring[ids[i] % RING].function = call->function;
        }
    if (what == ESCAPED)
        (void)ran_locked(call->function, call->symbol != NULL ? call->symbol : "");
    pthread_mutex_unlock(&lock);
}

/* ---- Work ---- */

static void count_record(const uint8_t *record)
{
    uint32_t kind, id = 0;
    const char *name = "";
    memcpy(&kind, record, sizeof kind);
    for (size_t i = 0; i < RECORD_KINDS; i++)
        if (records[i].kind == kind)
            memcpy(&id, record + records[i].correlation, sizeof id);
    if (kind == KERNEL)
        memcpy(&name, record + KERNEL_NAME, sizeof name);
    pthread_mutex_lock(&lock);
    const class what = id != 0 && ring[id % RING].correlation == id ? ring[id % RING].what : UNSEEN;
    kernels += kind == KERNEL;
    kernels_gated += kind == KERNEL && what == GATED;
    /* The driver's own work in a call that submits none, such as loading a module, is no escape. */
    const bool of_driver = kind != KERNEL && (what == OTHER || id == 0);
    if (what != GATED && what != HOOK && !of_driver)
        ++*ran_locked(what == UNSEEN ? "(a call that was not seen)" : ring[id % RING].function, name);
    pthread_mutex_unlock(&lock);
}

static void want_buffer(uint8_t **buffer, size_t *size, size_t *most_records)
{
    void *memory = NULL;
    *most_records = 0; /* no limit */
    *size = posix_memalign(&memory, 8, (size_t)1 << 20) == 0 ? (size_t)1 << 20 : 0;
    *buffer = *size != 0 ? memory : NULL;
}

static void full_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid_size)
{
    void *record = NULL;
    size_t more = 0;
    (void)size;
    while (valid_size != 0 && next_record(buffer, valid_size, &record) == 0)
        count_record(record);
    if (dropped(context, stream, &more) == 0)
        lost += more;
    free(buffer);
}

/* ---- Begin and end ---- */

/* The application's CUPTI if one is loaded (as by PyTorch): CUPTI admits one subscriber.  NULL, or what failed. */
static const char *watch(void)
{
    static const char *const places[] = {"libcupti.so.13", "libcupti.so.12"};
    const struct {
        const char *name;
        void *where;
    } wanted[] = {
        {"cuptiSubscribe", &subscribe}, {"cuptiEnableDomain", &enable_domain}, {"cuptiActivityRegisterCallbacks", &register_callbacks},
        {"cuptiActivityEnable", &enable}, {"cuptiActivityFlushAll", &flush_all}, {"cuptiActivityGetNextRecord", &next_record},
        {"cuptiActivityGetNumDroppedRecords", &dropped},
    };
    void *subscriber = NULL, *library = NULL;
    for (size_t i = 0; library == NULL && i < 2; i++)
        library = dlopen(places[i], RTLD_NOLOAD | RTLD_NOW);
    if (library == NULL && (library = dlopen(getenv("NVSHARE_CUPTI_LIBRARY"), RTLD_NOW)) == NULL)
        return "CUPTI cannot be loaded";
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *address = dlsym(library, wanted[i].name);
        if (address == NULL)
            return wanted[i].name;
        memcpy(wanted[i].where, &address, sizeof address);
    }
    if (subscribe(&subscriber, on_call, NULL) != 0)
        return "cuptiSubscribe fails: another profiler of this process may have CUPTI";
    if (enable_domain(1, subscriber, DRIVER) != 0 || enable_domain(1, subscriber, RUNTIME) != 0 || register_callbacks(want_buffer, full_buffer) != 0)
        return "CUPTI refuses callbacks";
    for (size_t i = 0; i < RECORD_KINDS; i++)
        if (enable(records[i].kind) != 0)
            return "cuptiActivityEnable fails";
    return NULL;
}

static FILE *report;
static pid_t owner;
static const char *problem;

static void at_end(void)
{
    if (getpid() != owner) /* in the child of a fork */
        return;
    if (problem == NULL)
        (void)flush_all(FLUSH_FORCED);
    if (problem == NULL && (hook_active == NULL || hook_active() != 1))
        problem = "its gate was open";
    if (problem == NULL && lost != 0)
        problem = "CUPTI lost records";
    pthread_mutex_lock(&lock);
    fprintf(report, "%u\t%u\t%s\n", kernels, kernels_gated, problem != NULL ? problem : "");
    for (unsigned i = 0; i < escape_count; i++)
        fprintf(report, "%s\t%s\t%u\n", escapes[i].function, escapes[i].symbol, escapes[i].ran);
    pthread_mutex_unlock(&lock);
    fclose(report);
}

/* The driver calls it in cuInit.  An empty report is of a process that was killed. */
NVS_EXPORT int InitializeInjection(void)
{
    char path[4096];
    if (report != NULL)
        return 1;
    owner = getpid();
    snprintf(path, sizeof path, "%s/%ld", getenv("NVSHARE_REPORTS"), (long)owner);
    if ((report = fopen(path, "we")) == NULL)
        abort();
    void *address = dlsym(RTLD_DEFAULT, "nvshare_gate_depth");
    memcpy(&gate_depth, &address, sizeof address);
    address = dlsym(RTLD_DEFAULT, "nvshare_active");
    memcpy(&hook_active, &address, sizeof address);
    problem = watch();
    (void)atexit(at_end);
    return 1;
}
