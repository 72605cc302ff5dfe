/* The part of CUPTI's ABI that the bypass detector uses, so that a build needs no CUPTI.
 *
 * CUPTI is found at run time.  These declarations hold for every CUPTI from 11.8 to 13.5 (NVS_CUPTI_KNOWS); a test compares them with the
 * headers of the installed one.  Only the fields of a record that have an offset here may be read.
 */
#ifndef NVS_CUPTI_ABI_H
#define NVS_CUPTI_ABI_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* cuptiGetVersion: 18 is 11.8, 28 is 12.9; from 13.0 on xxyyzz, 130000. */
#define NVS_CUPTI_KNOWS(version) (((version) >= 18 && (version) <= 28) || ((version) >= 130000 && (version) < 130600))

enum { /* CUptiResult */
    NVS_CUPTI_SUCCESS = 0,
    NVS_CUPTI_MAX_LIMIT_REACHED = 12,
    NVS_CUPTI_MULTIPLE_SUBSCRIBERS = 39,
};

enum { /* CUpti_CallbackDomain, CUpti_ApiCallbackSite */
    NVS_CUPTI_DRIVER = 1,
    NVS_CUPTI_RUNTIME = 2,
    NVS_CUPTI_ENTER = 0,
    NVS_CUPTI_EXIT = 1,
};

enum { /* CUpti_ActivityKind; the first four bytes of a record */
    NVS_CUPTI_MEMCPY = 1,
    NVS_CUPTI_MEMSET = 2,
    NVS_CUPTI_CONCURRENT_KERNEL = 10,
    NVS_CUPTI_MEMCPY_PEER = 22,
};

enum { /* offsets in a record: 32 bits each, but for the name, a pointer that is valid until the buffer is freed */
    NVS_CUPTI_KERNEL_CORRELATION = 92,
    NVS_CUPTI_KERNEL_NAME = 104,
    NVS_CUPTI_MEMCPY_CORRELATION = 44,
    NVS_CUPTI_MEMSET_CORRELATION = 44,
    NVS_CUPTI_MEMCPY_PEER_CORRELATION = 60,
};

enum { NVS_CUPTI_FLUSH_FORCED = 1 };

typedef struct nvs_cupti_call { /* CUpti_CallbackData */
    uint32_t site;
    const char *function; /* never freed */
    const void *parameters;
    void *returned;
    const char *symbol; /* of a launch: the kernel */
    void *context;
    uint32_t context_id;
    uint64_t *scratch;
    uint32_t correlation;
} nvs_cupti_call;

typedef void nvs_cupti_on_call(void *argument, uint32_t domain, uint32_t callback_id, const nvs_cupti_call *call);
typedef void nvs_cupti_want_buffer(uint8_t **buffer, size_t *size, size_t *most_records);
typedef void nvs_cupti_full_buffer(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid_size);

typedef int nvs_cupti_get_version(uint32_t *version);
typedef int nvs_cupti_subscribe(void **subscriber, nvs_cupti_on_call *callback, void *argument);
typedef int nvs_cupti_enable_domain(uint32_t enable, void *subscriber, uint32_t domain);
typedef int nvs_cupti_register(nvs_cupti_want_buffer *want, nvs_cupti_full_buffer *full);
typedef int nvs_cupti_enable(uint32_t kind);
typedef int nvs_cupti_flush_all(uint32_t flags);
typedef int nvs_cupti_next_record(uint8_t *buffer, size_t valid_size, void **record);
typedef int nvs_cupti_result_string(int result, const char **name);
typedef int nvs_cupti_dropped(void *context, uint32_t stream, size_t *dropped);

#endif
