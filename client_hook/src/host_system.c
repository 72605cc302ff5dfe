/* What host_pool.c asks of the operating system: how much memory is left, and memory that is near a GPU and really there. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "host_system.h"

#include "cuda_api.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_TOUCHERS = 8 };

/* A number behind a word in a small file, or the file's only number when there is no word; UINT64_MAX when it is not there. */
static uint64_t number_in(const char *path, const char *word)
{
    char text[4096];
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return UINT64_MAX;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    if (size <= 0)
        return UINT64_MAX;
    text[size] = 0;
    const char *at = word != NULL ? strstr(text, word) : text;
    if (at == NULL)
        return UINT64_MAX;
    at += word != NULL ? strlen(word) : 0;
    while (*at == ' ' || *at == ':')
        at++;
    return *at >= '0' && *at <= '9' ? strtoull(at, NULL, 10) : UINT64_MAX;
}

uint64_t nvs_host_system_left(void)
{
    uint64_t total = number_in("/proc/meminfo", "MemTotal"), left = number_in("/proc/meminfo", "MemAvailable");
    if (total == UINT64_MAX || left == UINT64_MAX)
        return UINT64_MAX;
    uint64_t keep = total / 10;
    left = left > keep ? (left - keep) * 1024 : 0;
    uint64_t bound = number_in("/sys/fs/cgroup/memory.max", NULL), used = number_in("/sys/fs/cgroup/memory.current", NULL);
    if (bound != UINT64_MAX && used != UINT64_MAX) {
        uint64_t usable = bound - bound / 10;
        uint64_t of_group = usable > used ? usable - used : 0;
        left = of_group < left ? of_group : left;
    }
    return left;
}

typedef struct stretch {
    char *from, *to;
} stretch;

static void *touch(void *argument)
{
    const stretch *mine = argument;
    for (volatile char *at = mine->from; at < mine->to; at += 4096)
        *at = 0;
    return NULL;
}

/* The first touch is what takes the time: by several threads, each its own part. */
static void touch_all(char *memory, size_t bytes, bool gently)
{
    stretch parts[MAX_TOUCHERS];
    pthread_t threads[MAX_TOUCHERS];
    long processors = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned count = processors > MAX_TOUCHERS ? MAX_TOUCHERS : processors < 1 ? 1 : (unsigned)processors;
    unsigned started = 0;
    if (gently || bytes < (32u << 20))
        count = 1;
    size_t share = (bytes / count + 4095) / 4096 * 4096;
    for (unsigned i = 0; i < count; i++) {
        char *from = memory + i * share, *end = memory + bytes;
        parts[i] = (stretch){from < end ? from : end, i + 1 < count && from + share < end ? from + share : end};
    }
    while (started + 1 < count && pthread_create(&threads[started], NULL, touch, &parts[started]) == 0)
        started++;
    for (unsigned i = started; i < count; i++)
        touch(&parts[i]);
    while (started > 0)
        pthread_join(threads[--started], NULL);
}

/* Near the GPU, where the system has several memories; a preference only. */
static void bind_near(char *memory, size_t bytes, uint32_t gpu)
{
    enum { PREFERRED = 1 }; /* MPOL_PREFERRED */
    char id[32], path[96];
    if (NVS_REAL(cuDeviceGetPCIBusId)(id, sizeof id, (CUdevice)gpu) != CUDA_SUCCESS)
        return;
    id[sizeof id - 1] = 0;
    for (char *at = id; *at != 0; at++)
        *at = *at >= 'A' && *at <= 'F' ? (char)(*at - 'A' + 'a') : *at;
    snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", id);
    uint64_t node = number_in(path, NULL);
    if (node >= 64)
        return;
    unsigned long mask = 1ul << node;
    (void)syscall(SYS_mbind, memory, bytes, PREFERRED, &mask, 8 * sizeof mask, 0);
}

bool nvs_host_map(uint32_t gpu, size_t bytes, size_t alignment, bool gently, nvs_host_mapping *out)
{
    size_t raw_bytes = bytes + alignment;
    char *raw = mmap(NULL, raw_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED)
        return false;
    uintptr_t aligned = ((uintptr_t)raw + alignment - 1) & ~(uintptr_t)(alignment - 1);
    char *memory = raw + (aligned - (uintptr_t)raw);
    (void)madvise(memory, bytes, MADV_HUGEPAGE);
    (void)madvise(memory, bytes, MADV_DONTFORK);
    bind_near(memory, bytes, gpu);
    touch_all(memory, bytes, gently);
    *out = (nvs_host_mapping){.memory = memory, .raw = raw, .raw_bytes = raw_bytes};
    return true;
}

void nvs_host_unmap(const nvs_host_mapping *mapping)
{
    munmap(mapping->raw, mapping->raw_bytes);
}
