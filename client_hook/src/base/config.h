/* The settings of this process, read once from its environment.
 *
 * A setuid program has the hook where /etc/ld.so.preload names it.  There the environment is another user's: it counts as empty, and the hook is
 * inert.
 */
#ifndef NVS_CONFIG_H
#define NVS_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Where device allocations go; as on the wire, but AUTO: not chosen yet (memory/backend.h). */
typedef enum nvs_mode { NVS_MODE_DEVICE, NVS_MODE_MANAGED, NVS_MODE_SWAP, NVS_MODE_AUTO } nvs_mode;

typedef struct nvs_settings {
    bool enabled;
    bool stripped;           /* it is not, for want of NVSHARE_SOCKET alone: the program has an emptied environment */
    char socket[108];        /* NVSHARE_SOCKET */
    int32_t coordinator_user;/* NVSHARE_COORDINATOR_USER: the user id that listens there; -1: any */
    char name[64];           /* NVSHARE_NAME, else the script's or the program's */
    char placement[256];     /* NVSHARE_PLACEMENT, as the launcher got it from the coordinator; empty: none */
    uint8_t memory_mode;     /* NVSHARE_MEMORY: an nvs_mode; the one in force once it is chosen */
    bool memory_auto;        /* it was AUTO */
    bool memory_late;        /* it was AUTO or SWAP, so the GPUs decide: it is chosen once the driver has begun */
    uint64_t memory_limit;   /* NVSHARE_MEMORY_LIMIT, bytes or 4GiB; 0: none */
    uint64_t host_limit;     /* NVSHARE_HOST_LIMIT, likewise: host memory for evicted memory in mode swap */
    bool spatial;            /* NVSHARE_MPS=1: a client of MPS */
    char profile[512];       /* the variables of base/profile.gen.h: lines of `word=value` for the coordinator */
    struct {                 /* without a coordinator */
        bool run;            /* NVSHARE_ON_LOSS=wait | run */
        uint64_t timeout_ns; /* NVSHARE_LOSS_TIMEOUT, 30s by default: when `run` takes effect */
    } on_loss;
} nvs_settings;
extern nvs_settings nvs_config;

static inline bool nvs_swapping(void) { return nvs_config.memory_mode == NVS_MODE_SWAP; }

void nvs_config_read(void); /* before any other thread exists */

/* Whether this process serves a remote program (Lupine); `out`: the address from which its calls come. */
bool nvs_config_remote_peer(char *out, size_t size);

#endif
