/* See handdown.h. */
#define _GNU_SOURCE /* struct ucred, accept4, MSG_CMSG_CLOEXEC, statx */
#include "handdown.h"

#include "agent.h"
#include "descriptor.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

enum { UUID_BYTES = 96, MOST_KEPT = 4096, SPARES = 32, DONORS = 4 };

typedef struct giving_end {
    uint64_t heir; /* a client's id; 0: nobody */
    int socket;    /* open while `connected` */
    bool connected;
    char gpu_uuid[UUID_BYTES];
} giving_end;

typedef struct spare {
    uint64_t bytes;
    int descriptor;
} spare;

typedef struct taking_end {
    bool listening;
    int listener, donors[DONORS];
    char gpu_uuid[UUID_BYTES];
    spare spares[SPARES];
    uint32_t donor_count, spare_count;
} taking_end;

typedef struct parcel { /* what goes beside a descriptor */
    uint64_t bytes;
    char gpu_uuid[UUID_BYTES];
} parcel;

static giving_end giving[NVS_MAX_GPUS];
static taking_end taking[NVS_MAX_GPUS];
static _Atomic uint32_t used_ends; /* GPUs, by bit, of which an end was ever used.  Relaxed: as `kept` */
static _Atomic int kept[MOST_KEPT]; /* 0: a free place.  Relaxed: each stands for itself, and only who put it there takes it out */
static _Atomic uint32_t kept_count; /* relaxed: it only bounds how many there are */

/* --- sockets --- */

/* An abstract name: it goes with its socket, and is of one network namespace.  Containers that do not share the coordinator's socket
 * have different names, and so nothing to give to each other. */
static bool name_of(uint64_t client, const char *gpu_uuid, struct sockaddr_un *address, socklen_t *length)
{
    uint64_t hash = UINT64_C(14695981039346656037); /* FNV-1a: the name has no room for all of it */
    struct statx at; /* by its number: the C library of old systems has no function for it */
    if (syscall(SYS_statx, AT_FDCWD, nvs_config.socket, 0, STATX_INO, &at) != 0)
        return false;
    for (const char *at_uuid = gpu_uuid; *at_uuid != 0; at_uuid++)
        hash = (hash ^ (uint8_t)*at_uuid) * UINT64_C(1099511628211);
    *address = (struct sockaddr_un){.sun_family = AF_UNIX};
    int written = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "nvshare-%x:%x-%llx-%llu-%llx", at.stx_dev_major, at.stx_dev_minor,
                           (unsigned long long)at.stx_ino, (unsigned long long)client, (unsigned long long)hash);
    *length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)written);
    return true;
}

static bool same_user(int fd)
{
    struct ucred peer;
    socklen_t size = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) == 0 && peer.uid == geteuid();
}

static int new_socket(void)
{
    return socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* --- giving --- */

static void copy_uuid(char *to, const char *gpu_uuid)
{
    size_t length = strnlen(gpu_uuid, UUID_BYTES - 1);
    memcpy(to, gpu_uuid, length);
    to[length] = 0;
}

void nvs_bequest_begin(uint32_t gpu, const char *gpu_uuid, uint64_t heir)
{
    nvs_bequest_end(gpu);
    atomic_fetch_or_explicit(&used_ends, UINT32_C(1) << gpu, memory_order_relaxed);
    giving[gpu].heir = heir;
    copy_uuid(giving[gpu].gpu_uuid, gpu_uuid);
}

bool nvs_bequest_open(uint32_t gpu)
{
    return giving[gpu].heir != 0;
}

static bool reach(giving_end *end)
{
    struct sockaddr_un address;
    socklen_t length;
    if (end->connected)
        return true;
    if (end->heir == 0 || !name_of(end->heir, end->gpu_uuid, &address, &length))
        return false;
    int fd = new_socket();
    if (fd < 0)
        return false;
    bool there = connect(fd, (const struct sockaddr *)&address, length) == 0;
    if (there && same_user(fd)) {
        end->socket = fd;
        return end->connected = true;
    }
    if (there || errno != ECONNREFUSED) /* else it does not listen yet: asked again with the next piece */
        end->heir = 0;
    close(fd);
    return false;
}

bool nvs_bequest_give(uint32_t gpu, uint64_t bytes, int descriptor)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control = {0};
    parcel content = {.bytes = bytes};
    struct iovec part = {&content, sizeof content};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.room};
    if (descriptor < 0 || !reach(&giving[gpu]))
        return false;
    memcpy(content.gpu_uuid, giving[gpu].gpu_uuid, sizeof content.gpu_uuid);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof descriptor);
    memcpy(CMSG_DATA(header), &descriptor, sizeof descriptor);
    return sendmsg(giving[gpu].socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof content;
}

void nvs_bequest_end(uint32_t gpu)
{
    if (giving[gpu].connected)
        close(giving[gpu].socket);
    giving[gpu] = (giving_end){0};
}

/* --- taking --- */

void nvs_inheritance_begin(uint32_t gpu, const char *gpu_uuid, uint64_t client)
{
    taking_end *end = &taking[gpu];
    struct sockaddr_un address;
    socklen_t length;
    nvs_inheritance_end(gpu);
    atomic_fetch_or_explicit(&used_ends, UINT32_C(1) << gpu, memory_order_relaxed);
    copy_uuid(end->gpu_uuid, gpu_uuid);
    if (client == 0 || !name_of(client, gpu_uuid, &address, &length) || (end->listener = new_socket()) < 0)
        return;
    end->listening = bind(end->listener, (const struct sockaddr *)&address, length) == 0 && listen(end->listener, DONORS) == 0;
    if (!end->listening)
        close(end->listener);
}

static void welcome(taking_end *end)
{
    while (end->listening && end->donor_count < DONORS) {
        int donor = accept4(end->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (donor < 0)
            return;
        if (same_user(donor))
            end->donors[end->donor_count++] = donor;
        else
            close(donor);
    }
}

/* One parcel.  False: nothing has come (any more). */
static bool receive(taking_end *end, int donor)
{
    union {
        char room[CMSG_SPACE(sizeof(int))];
        struct cmsghdr aligned;
    } control = {0};
    parcel content = {0};
    struct iovec part = {&content, sizeof content};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control.room};
    ssize_t got = recvmsg(donor, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got <= 0)
        return false;
    int descriptor = -1;
    const struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS && header->cmsg_len == CMSG_LEN(sizeof descriptor))
        memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    if (descriptor < 0)
        return true;
    content.gpu_uuid[UUID_BYTES - 1] = 0;
    if (got == (ssize_t)sizeof content && strcmp(content.gpu_uuid, end->gpu_uuid) == 0)
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

void nvs_handdown_after_fork(void)
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
