/* The simulated CUPTI 13 (libnvshare_cupti.so), for the bypass detector: callbacks of the driver domain, and records of kernels,
 * copies and memsets, in buffers of the tool.
 *
 * The hook's cupti_abi.h declares the layout of records.  The tool gets a buffer when it is full, or at a flush.
 * There is no runtime domain: the runtime is the real one.
 */
#include "simulated_gpu.h"

#include "../../../client_hook/src/verify/cupti_abi.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { INVALID_PARAMETER = 1, NOT_INITIALIZED = 15, INVALID_KIND = 21, API_VERSION = 130000 };
enum { RECORD_BYTES = 160, MOST_KINDS = 64 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the variables below; taken inside the driver's lock */
static nvs_cupti_on_call *on_call;
static void *on_call_argument;
static bool driver_domain, kinds[MOST_KINDS];
static nvs_cupti_want_buffer *want;
static nvs_cupti_full_buffer *full;
static uint8_t *buffer;
static size_t buffer_size, buffer_used, lost;
static void (*observe)(const nvs_sim_observer *);

static void call_begins(const char *function, uint32_t number)
{
    const nvs_cupti_call call = {.site = NVS_CUPTI_ENTER, .function = function, .correlation = number};
    if (driver_domain)
        on_call(on_call_argument, NVS_CUPTI_DRIVER, 1, &call);
}

static void flush_locked(void)
{
    if (buffer != NULL)
        full(NULL, 0, buffer, buffer_size, buffer_used);
    buffer = NULL;
    buffer_used = buffer_size = 0;
}

static uint8_t *new_record_locked(void)
{
    size_t most = 0;
    if (buffer != NULL && buffer_size - buffer_used < RECORD_BYTES)
        flush_locked();
    if (buffer == NULL) {
        want(&buffer, &buffer_size, &most);
        if (buffer == NULL || buffer_size < RECORD_BYTES) {
            lost++;
            return NULL;
        }
    }
    uint8_t *record = buffer + buffer_used;
    buffer_used += RECORD_BYTES;
    memset(record, 0, RECORD_BYTES);
    return record;
}

static void work_ran(uint16_t kind, const char *symbol, uint32_t number, uint64_t bytes)
{
    static const struct {
        uint32_t kind;
        size_t correlation; /* offset */
    } layouts[] = {
        [NVS_SIM_KERNEL] = {NVS_CUPTI_CONCURRENT_KERNEL, NVS_CUPTI_KERNEL_CORRELATION},
        [NVS_SIM_COPY] = {NVS_CUPTI_MEMCPY, NVS_CUPTI_MEMCPY_CORRELATION},
        [NVS_SIM_MEMSET] = {NVS_CUPTI_MEMSET, NVS_CUPTI_MEMSET_CORRELATION},
    };
    pthread_mutex_lock(&lock);
    uint8_t *record = kinds[layouts[kind].kind] ? new_record_locked() : NULL;
    if (record != NULL) {
        memcpy(record, &layouts[kind].kind, sizeof layouts[kind].kind);
        memcpy(record + layouts[kind].correlation, &number, sizeof number);
        if (kind == NVS_SIM_KERNEL)
            memcpy(record + NVS_CUPTI_KERNEL_NAME, &symbol, sizeof symbol);
    }
    pthread_mutex_unlock(&lock);
}

EXPORT int cuptiGetVersion(uint32_t *version)
{
    if (version == NULL)
        return INVALID_PARAMETER;
    *version = API_VERSION;
    return NVS_CUPTI_SUCCESS;
}

EXPORT int cuptiGetResultString(int result, const char **name)
{
    static const struct {
        int result;
        const char *name;
    } known[] = {
        {NVS_CUPTI_SUCCESS, "CUPTI_SUCCESS"},
        {INVALID_PARAMETER, "CUPTI_ERROR_INVALID_PARAMETER"},
        {NVS_CUPTI_MAX_LIMIT_REACHED, "CUPTI_ERROR_MAX_LIMIT_REACHED"},
        {NOT_INITIALIZED, "CUPTI_ERROR_NOT_INITIALIZED"},
        {INVALID_KIND, "CUPTI_ERROR_INVALID_KIND"},
        {NVS_CUPTI_MULTIPLE_SUBSCRIBERS, "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED"},
    };
    for (size_t i = 0; name != NULL && i < sizeof known / sizeof *known; i++)
        if (known[i].result == result) {
            *name = known[i].name;
            return NVS_CUPTI_SUCCESS;
        }
    return INVALID_PARAMETER;
}

EXPORT int cuptiSubscribe(void **subscriber, nvs_cupti_on_call *callback, void *argument)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
    void *address = driver != NULL ? dlsym(driver, "nvs_sim_observe") : NULL;
    if (subscriber == NULL || callback == NULL)
        return INVALID_PARAMETER;
    if (address == NULL)
        return NOT_INITIALIZED; /* no driver, or not the simulated one */
    if (on_call != NULL)
        return NVS_CUPTI_MULTIPLE_SUBSCRIBERS;
    memcpy(&observe, &address, sizeof observe);
    on_call = callback;
    on_call_argument = argument;
    *subscriber = &on_call;
    return NVS_CUPTI_SUCCESS;
}

EXPORT int cuptiEnableDomain(uint32_t enable, void *subscriber, uint32_t domain)
{
    static const nvs_sim_observer observer = {call_begins, work_ran};
    if (subscriber != &on_call || (domain != NVS_CUPTI_DRIVER && domain != NVS_CUPTI_RUNTIME))
        return INVALID_PARAMETER;
    if (domain == NVS_CUPTI_DRIVER) {
        driver_domain = enable != 0;
        observe(&observer);
    }
    return NVS_CUPTI_SUCCESS;
}

EXPORT int cuptiActivityRegisterCallbacks(nvs_cupti_want_buffer *wanted, nvs_cupti_full_buffer *completed)
{
    if (wanted == NULL || completed == NULL)
        return INVALID_PARAMETER;
    pthread_mutex_lock(&lock);
    want = wanted;
    full = completed;
    pthread_mutex_unlock(&lock);
    return NVS_CUPTI_SUCCESS;
}

EXPORT int cuptiActivityEnable(uint32_t kind)
{
    int result = NVS_CUPTI_SUCCESS;
    pthread_mutex_lock(&lock);
    if (want == NULL)
        result = NOT_INITIALIZED;
    else if (kind >= MOST_KINDS)
        result = INVALID_KIND;
    else
        kinds[kind] = true;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT int cuptiActivityFlushAll(uint32_t flags)
{
    pthread_mutex_lock(&lock);
    flush_locked();
    pthread_mutex_unlock(&lock);
    return NVS_CUPTI_SUCCESS;
}

/* *record: the previous record, at first NULL. */
EXPORT int cuptiActivityGetNextRecord(uint8_t *from, size_t valid_size, void **record)
{
    if (from == NULL || record == NULL)
        return INVALID_PARAMETER;
    uint8_t *next = *record == NULL ? from : (uint8_t *)*record + RECORD_BYTES;
    if (next + RECORD_BYTES > from + valid_size)
        return NVS_CUPTI_MAX_LIMIT_REACHED;
    *record = next;
    return NVS_CUPTI_SUCCESS;
}

/* The number since the last call.  The tool calls this from `full`, so the lock is held. */
EXPORT int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *dropped)
{
    if (dropped == NULL)
        return INVALID_PARAMETER;
    *dropped = lost;
    lost = 0;
    return NVS_CUPTI_SUCCESS;
}
