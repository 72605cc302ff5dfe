/* See handdown.h. */
#include "swap/handdown.h"

#include "base/process/descriptor.h"
#include "ipc/ipc.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

enum { UUID_BYTES = 96, MOST_KEPT = 4096, SPARES = 32, DONORS = 4 };
#define AT_ONCE 0u /* a deadline that has passed: nothing here waits */

typedef struct giving_end {
    nvs_handoff to;
    int socket; /* open while `connected` */
    bool connected;
    char gpu_uuid[UUID_BYTES];
} giving_end;

typedef struct spare {
    uint64_t bytes;
    int descriptor;
} spare;

typedef struct taking_end {
    bool listening;
    nvs_handoff from;
    int listener, donors[DONORS];
    char gpu_uuid[UUID_BYTES];
    spare spares[SPARES];
    uint32_t donor_count, spare_count;
} taking_end;

typedef struct parcel { /* what goes beside a descriptor */
    uint64_t bytes, token;
    char gpu_uuid[UUID_BYTES];
} parcel;

static giving_end giving[NVS_MAX_GPUS];
static taking_end taking[NVS_MAX_GPUS];
NVS_FORK_STATE static _Atomic uint32_t used_ends; /* GPUs, by bit, of which an end was ever used.  Relaxed: as `kept` */
static _Atomic int kept[MOST_KEPT]; /* 0: a free place.  Relaxed: each stands for itself, and only who put it there takes it out */
NVS_FORK_STATE static _Atomic uint32_t kept_count; /* relaxed: it only bounds how many there are */

static void copy_uuid(char *to, const char *gpu_uuid)
{
    size_t length = strnlen(gpu_uuid, UUID_BYTES - 1);
    memcpy(to, gpu_uuid, length);
    to[length] = 0;
}

/* One name for each GPU: a program may be restored on several at once. */
static nvs_ipc_secret name_of(const nvs_handoff *handoff, const char *gpu_uuid)
{
    uint64_t hash = UINT64_C(14695981039346656037); /* FNV-1a: the name has no room for all of it */
    nvs_ipc_secret name;
    for (const char *at = gpu_uuid; *at != 0; at++)
        hash = (hash ^ (uint8_t)*at) * UINT64_C(1099511628211);
    _Static_assert(sizeof name.bytes == sizeof handoff->socket + sizeof hash, "both fill it");
    memcpy(name.bytes, &handoff->socket, sizeof handoff->socket);
    memcpy(name.bytes + sizeof handoff->socket, &hash, sizeof hash);
    return name;
}

/* --- giving --- */

void nvs_bequest_begin(uint32_t gpu, const char *gpu_uuid, nvs_handoff handoff)
{
    nvs_bequest_end(gpu);
    atomic_fetch_or_explicit(&used_ends, UINT32_C(1) << gpu, memory_order_relaxed);
    giving[gpu].to = handoff;
    copy_uuid(giving[gpu].gpu_uuid, gpu_uuid);
}

bool nvs_bequest_open(uint32_t gpu)
{
    return giving[gpu].to.socket != 0;
}

/* False: the other end does not listen yet, and is asked again with the next piece. */
static bool reach(giving_end *end)
{
    if (!end->connected && end->to.socket != 0) {
        const nvs_ipc_secret name = name_of(&end->to, end->gpu_uuid);
        end->socket = nvs_ipc_connect(&name, AT_ONCE);
        end->connected = end->socket >= 0;
    }
    return end->connected;
}

bool nvs_bequest_give(uint32_t gpu, uint64_t bytes, int descriptor)
{
    giving_end *end = &giving[gpu];
    parcel content = {.bytes = bytes, .token = end->to.token};
    if (descriptor < 0 || !reach(end))
        return false;
    memcpy(content.gpu_uuid, end->gpu_uuid, sizeof content.gpu_uuid);
    return nvs_ipc_send(end->socket, &content, sizeof content, &descriptor, 1, AT_ONCE);
}

void nvs_bequest_end(uint32_t gpu)
{
    if (giving[gpu].connected)
        close(giving[gpu].socket);
    giving[gpu] = (giving_end){0};
}

/* --- taking --- */

void nvs_inheritance_begin(uint32_t gpu, const char *gpu_uuid, nvs_handoff handoff)
{
    taking_end *end = &taking[gpu];
    nvs_inheritance_end(gpu);
    atomic_fetch_or_explicit(&used_ends, UINT32_C(1) << gpu, memory_order_relaxed);
    copy_uuid(end->gpu_uuid, gpu_uuid);
    end->from = handoff;
    if (handoff.socket == 0)
        return;
    const nvs_ipc_secret name = name_of(&handoff, gpu_uuid);
    end->listener = nvs_ipc_listen(&name);
    end->listening = end->listener >= 0;
}

static void welcome(taking_end *end)
{
    bool ignored;
    while (end->listening && end->donor_count < DONORS) {
        int donor = nvs_ipc_accept(end->listener, &ignored);
        if (donor < 0)
            return;
        end->donors[end->donor_count++] = donor;
    }
}

/* One parcel.  False: nothing has come (any more). */
static bool receive(taking_end *end, int donor)
{
    parcel content = {0};
    int descriptor;
    uint32_t count;
    ssize_t got = nvs_ipc_receive(donor, &content, sizeof content, &descriptor, 1, &count, AT_ONCE);
    if (got <= 0)
        return false;
    if (count == 0)
        return true;
    content.gpu_uuid[UUID_BYTES - 1] = 0;
    if (got == (ssize_t)sizeof content && content.token == end->from.token && strcmp(content.gpu_uuid, end->gpu_uuid) == 0)
        end->spares[end->spare_count++] = (spare){content.bytes, descriptor};
    else
        close(descriptor);
    return true;
}

int nvs_inheritance_take(uint32_t gpu, uint64_t bytes)
{
    taking_end *end = &taking[gpu];
    welcome(end);
    for (uint32_t i = 0; i < end->donor_count; i++)
        while (end->spare_count < SPARES && receive(end, end->donors[i])) {
        }
    for (uint32_t i = 0; i < end->spare_count; i++) {
        if (end->spares[i].bytes != bytes)
            continue;
        int descriptor = end->spares[i].descriptor;
        memmove(&end->spares[i], &end->spares[i + 1], (--end->spare_count - i) * sizeof end->spares[0]);
        return descriptor;
    }
    if (end->spare_count == SPARES) { /* of other sizes: the oldest would only be in the way of what comes */
        close(end->spares[0].descriptor);
        memmove(&end->spares[0], &end->spares[1], --end->spare_count * sizeof end->spares[0]);
    }
    return -1;
}

bool nvs_inheritance_drop(uint32_t gpu)
{
    taking_end *end = &taking[gpu];
    bool some = end->spare_count > 0;
    while (end->spare_count > 0)
        close(end->spares[--end->spare_count].descriptor);
    return some;
}

void nvs_inheritance_end(uint32_t gpu)
{
    taking_end *end = &taking[gpu];
    (void)nvs_inheritance_drop(gpu);
    while (end->donor_count > 0)
        close(end->donors[--end->donor_count]); /* what is still in it the kernel closes */
    if (end->listening)
        close(end->listener);
    end->listening = false;
}

/* --- descriptors that are kept --- */

/* No more than a quarter of what the process may have. */
static uint32_t most_kept(int *from)
{
    const uint32_t most = nvs_descriptors_from(from);
    return most < MOST_KEPT ? most : MOST_KEPT;
}

static bool note(int descriptor)
{
    for (uint32_t i = 0; i < MOST_KEPT; i++) {
        int free_place = 0;
        if (atomic_compare_exchange_strong_explicit(&kept[i], &free_place, descriptor, memory_order_relaxed, memory_order_relaxed))
            return true;
    }
    return false;
}

int nvs_descriptor_keep(int descriptor)
{
    int from = 0, high = -1;
    if (atomic_fetch_add_explicit(&kept_count, 1, memory_order_relaxed) < most_kept(&from))
        high = fcntl(descriptor, F_DUPFD_CLOEXEC, from);
    if (high >= 0 && !note(high)) {
        close(high);
        high = -1;
    }
    if (high < 0)
        atomic_fetch_sub_explicit(&kept_count, 1, memory_order_relaxed);
    close(descriptor);
    return high;
}

void nvs_descriptor_drop(int descriptor)
{
    if (descriptor < 0)
        return;
    for (uint32_t i = 0; i < MOST_KEPT; i++) {
        int found = descriptor;
        if (atomic_compare_exchange_strong_explicit(&kept[i], &found, 0, memory_order_relaxed, memory_order_relaxed)) {
            close(descriptor);
            atomic_fetch_sub_explicit(&kept_count, 1, memory_order_relaxed);
            return;
        }
    }
}

NVS_FORK_CODE void nvs_handdown_after_fork(void)
{
    const uint32_t used = atomic_exchange_explicit(&used_ends, 0, memory_order_relaxed);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        if ((used >> gpu & 1) != 0) {
            nvs_bequest_end(gpu);
            nvs_inheritance_end(gpu);
        }
    const bool any_kept = atomic_load_explicit(&kept_count, memory_order_relaxed) != 0;
    for (uint32_t i = 0; any_kept && i < MOST_KEPT; i++) { /* else the child would hold the memory that its parent gives up */
        int descriptor = atomic_exchange_explicit(&kept[i], 0, memory_order_relaxed);
        if (descriptor > 0)
            close(descriptor);
    }
    atomic_store_explicit(&kept_count, 0, memory_order_relaxed);
}
