/* The entry point that the driver loads: subscribes to CUPTI, and counts what it reports.  See verify.h.
 *
 * The library is the application's CUPTI if one is loaded (as by PyTorch) and NVSHARE_CUPTI_LIBRARY names a copy of it; else the one that
 * NVSHARE_CUPTI_LIBRARY names; else the one that the loader finds.  CUPTI admits one subscriber, so a program with a profiler of its own
 * cannot be verified; the report says so.
 *
 * Work is matched with its call by correlation id: of the driver's call, or of the runtime's call around it, as CUPTI uses the outermost.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, RTLD_NOLOAD */
#include "detector.h"

#include "base/base.h"
#include "cupti_abi.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

int InitializeInjection(void);

static const size_t buffer_bytes = (size_t)1 << 20;

static nvs_cupti_get_version *get_version;
static nvs_cupti_subscribe *subscribe;
static nvs_cupti_enable_domain *enable_domain;
static nvs_cupti_register *register_callbacks;
static nvs_cupti_enable *enable;
static nvs_cupti_flush_all *flush_all;
static nvs_cupti_next_record *next_record;
static nvs_cupti_dropped *dropped;
static nvs_cupti_result_string *result_string;

static uint32_t (*gate_depth)(void); /* of the hook; NULL: the hook is not in this process */
static int (*hook_active)(void);
static nvs_findings findings;
static char problem[640];
static _Thread_local uint32_t runtime_correlation; /* of the runtime's call on this thread; 0: none */

static void on_call(void *argument, uint32_t domain, uint32_t callback_id, const nvs_cupti_call *call)
{
    if (domain == NVS_CUPTI_RUNTIME) {
        runtime_correlation = call->site == NVS_CUPTI_ENTER ? call->correlation : 0;
        return;
    }
    if (domain != NVS_CUPTI_DRIVER || call->site != NVS_CUPTI_ENTER || call->function == NULL)
        return;
    const uint32_t depth = gate_depth != NULL ? gate_depth() : 0;
    const nvs_passage passage = depth == 0 ? NVS_PASSAGE_NONE : depth == UINT32_MAX ? NVS_PASSAGE_HOOK : NVS_PASSAGE_GATED;
    nvs_tally_call(call->function, call->symbol, passage, call->correlation, runtime_correlation);
}

static void want_buffer(uint8_t **buffer, size_t *size, size_t *most_records)
{
    void *memory = NULL;
    *most_records = 0; /* no limit */
    *size = posix_memalign(&memory, 8, buffer_bytes) == 0 ? buffer_bytes : 0;
    *buffer = *size != 0 ? memory : NULL;
}

static uint32_t word_at(const uint8_t *record, size_t offset)
{
    uint32_t word;
    memcpy(&word, record + offset, sizeof word);
    return word;
}

static const struct {
    uint32_t kind;
    nvs_work work;
    size_t correlation;
} records[] = {
    {NVS_CUPTI_CONCURRENT_KERNEL, NVS_WORK_KERNEL, NVS_CUPTI_KERNEL_CORRELATION},
    {NVS_CUPTI_MEMCPY, NVS_WORK_COPY, NVS_CUPTI_MEMCPY_CORRELATION},
    {NVS_CUPTI_MEMSET, NVS_WORK_MEMSET, NVS_CUPTI_MEMSET_CORRELATION},
    {NVS_CUPTI_MEMCPY_PEER, NVS_WORK_COPY, NVS_CUPTI_MEMCPY_PEER_CORRELATION},
};
enum { RECORD_KINDS = sizeof records / sizeof *records };

static void count_record(const uint8_t *record)
{
    const char *name = NULL;
    const bool known = findings.matched; /* else only the kind of a record has a known place */
    for (size_t i = 0; i < RECORD_KINDS; i++) {
        if (word_at(record, 0) != records[i].kind)
            continue;
        if (known && records[i].work == NVS_WORK_KERNEL)
            memcpy(&name, record + NVS_CUPTI_KERNEL_NAME, sizeof name);
        nvs_tally_work(records[i].work, name, known ? word_at(record, records[i].correlation) : 0, known);
    }
}

static void full_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid_size)
{
    void *record = NULL;
    size_t lost = 0;
    while (valid_size != 0 && next_record(buffer, valid_size, &record) == NVS_CUPTI_SUCCESS)
        count_record(record);
    if (dropped(context, stream, &lost) == NVS_CUPTI_SUCCESS && lost != 0)
        nvs_tally_lost(lost);
    free(buffer);
}

static void *open_cupti(void)
{
    static const char *const sonames[] = {"libcupti.so.13", "libcupti.so.12"};
    const char *named = getenv("NVSHARE_CUPTI_LIBRARY");
    const char *file = named != NULL ? strrchr(named, '/') : NULL;
    const char *reason = NULL;
    void *library = NULL;
    /* The simulated GPU's CUPTI has another name; NVIDIA's does not work with the simulated driver. */
    const bool any = file == NULL || strncmp(file, "/libcupti.", strlen("/libcupti.")) == 0;
    for (size_t i = 0; any && library == NULL && i < 2; i++)
        library = dlopen(sonames[i], RTLD_NOLOAD | RTLD_NOW);
    if (library == NULL && named != NULL && named[0] != 0 && (library = dlopen(named, RTLD_NOW)) == NULL)
        reason = dlerror();
    for (size_t i = 0; library == NULL && reason == NULL && i < 2; i++)
        library = dlopen(sonames[i], RTLD_NOW);
    if (library == NULL)
        snprintf(problem, sizeof problem, "CUPTI cannot be loaded (%s): pip install nvidia-cuda-cupti, or name it in NVSHARE_CUPTI_LIBRARY",
                 reason != NULL ? reason : "no libcupti.so.13 or libcupti.so.12");
    return library;
}

static bool find_functions(void *library)
{
    const struct {
        const char *name;
        void *where;
    } wanted[] = {
        {"cuptiGetVersion", &get_version},
        {"cuptiSubscribe", &subscribe},
        {"cuptiEnableDomain", &enable_domain},
        {"cuptiActivityRegisterCallbacks", &register_callbacks},
        {"cuptiActivityEnable", &enable},
        {"cuptiActivityFlushAll", &flush_all},
        {"cuptiActivityGetNextRecord", &next_record},
        {"cuptiActivityGetNumDroppedRecords", &dropped},
        {"cuptiGetResultString", &result_string},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *address = dlsym(library, wanted[i].name);
        if (address == NULL) {
            snprintf(problem, sizeof problem, "this CUPTI has no %s: use one of CUDA 12 or 13", wanted[i].name);
            return false;
        }
        memcpy(wanted[i].where, &address, sizeof address); /* POSIX allows it */
    }
    return true;
}

static bool expect(const char *what, int result)
{
    if (result == NVS_CUPTI_SUCCESS)
        return true;
    const char *name = "";
    if (result == NVS_CUPTI_MULTIPLE_SUBSCRIBERS)
        snprintf(problem, sizeof problem, "another profiler of this process has CUPTI, which admits one only: run without it");
    else if (result_string == NULL || result_string(result, &name) != NVS_CUPTI_SUCCESS || name == NULL)
        snprintf(problem, sizeof problem, "CUPTI refuses: %s says %d", what, result);
    else
        snprintf(problem, sizeof problem, "CUPTI refuses: %s says %s", what, name);
    return false;
}

static bool watch(void)
{
    void *subscriber = NULL;
    void *library = open_cupti();
    if (library == NULL || !find_functions(library))
        return false;
    if (get_version(&findings.cupti) != NVS_CUPTI_SUCCESS)
        findings.cupti = 0; /* it cannot start: the next call returns the reason */
    findings.matched = NVS_CUPTI_KNOWS(findings.cupti);
    if (!expect("cuptiSubscribe", subscribe(&subscriber, on_call, NULL)) ||
        !expect("cuptiEnableDomain", enable_domain(1, subscriber, NVS_CUPTI_DRIVER)) ||
        !expect("cuptiEnableDomain", enable_domain(1, subscriber, NVS_CUPTI_RUNTIME)) ||
        !expect("cuptiActivityRegisterCallbacks", register_callbacks(want_buffer, full_buffer)))
        return false;
    for (size_t i = 0; i < RECORD_KINDS; i++)
        if (!expect("cuptiActivityEnable", enable(records[i].kind)))
            return false;
    return true;
}

static void at_end(void)
{
    static atomic_flag done = ATOMIC_FLAG_INIT;
    if (!nvs_report_is_ours() || atomic_flag_test_and_set_explicit(&done, memory_order_relaxed)) /* orders nothing else */
        return;
    if (findings.error == NULL)
        (void)flush_all(NVS_CUPTI_FLUSH_FORCED);
    findings.complete = true;
    findings.active = hook_active != NULL && hook_active() == 1;
    nvs_report_write(&findings);
}

/* The driver calls it once, in cuInit. */
NVS_EXPORT int InitializeInjection(void)
{
    static bool begun;
    const char *directory = getenv("NVSHARE_VERIFY_REPORT");
    if (begun || directory == NULL || directory[0] == 0)
        return 1;
    begun = true;
    void *address = dlsym(RTLD_DEFAULT, "nvshare_gate_depth");
    memcpy(&gate_depth, &address, sizeof address);
    address = dlsym(RTLD_DEFAULT, "nvshare_active");
    memcpy(&hook_active, &address, sizeof address);
    findings.hooked = gate_depth != NULL;
    nvs_report_open(directory);
    if (!watch())
        findings.error = problem;
    nvs_report_write(&findings);
    (void)atexit(at_end); /* if it fails, the report stays incomplete */
    return 1;
}
