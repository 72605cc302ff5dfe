/* See system.h. */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "host/system.h"

#include "driver/cuda_api.h"
#include "host/left.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MAX_TOUCHERS = 8 };

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

/* The first touch takes most of the time, so several threads share it. */
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

/* Prefers the NUMA node of the GPU. */
static void bind_near(char *memory, size_t bytes, uint32_t gpu)
{
    enum { PREFERRED = 1 }; /* MPOL_PREFERRED */
    char id[32], path[96];
    if (NVS_REAL(cuDeviceGetPCIBusId)(id, sizeof id, (CUdevice)gpu) != CUDA_SUCCESS)
        return;
    id[sizeof id - 1] = 0;
    for (char *at = id; *at != 0; at++)
        *at = *at >= 'A' && *at <= 'F' ? (char)(*at - 'A' + 'a') : *at;
    snprintf(path, sizeof path, "sys/bus/pci/devices/%s/numa_node", id);
    uint64_t node = nvs_host_number_in("", path, NULL);
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
