/* How much host memory is left: of the machine, and of the control groups that the process is in (both versions, nested). */
#define _GNU_SOURCE /* MAP_ANONYMOUS, madvise */
#include "host/system.h"

#include "driver/cuda_api.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_PATH = 1024, MOST_TEXT = 8192 };

/* A file's text, terminated by a zero.  False: it cannot be read, or is empty. */
static bool read_text(const char *root, const char *name, char text[MOST_TEXT])
{
    char path[MOST_PATH];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", root, name) >= sizeof path)
        return false;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    ssize_t size = read(file, text, MOST_TEXT - 1);
    close(file);
    if (size <= 0)
        return false;
    text[size] = 0;
    return true;
}

/* The number behind a word in a small file; without a word, the file's first number.  UINT64_MAX: there is none. */
static uint64_t host_number_in(const char *root, const char *name, const char *word)
{
    char text[MOST_TEXT];
    if (!read_text(root, name, text))
        return UINT64_MAX;
    const char *at = word != NULL ? strstr(text, word) : text;
    if (at == NULL)
        return UINT64_MAX;
    at += word != NULL ? strlen(word) : 0;
    while (*at == ' ' || *at == ':')
        at++;
    return *at >= '0' && *at <= '9' ? strtoull(at, NULL, 10) : UINT64_MAX;
}

typedef struct hierarchy { /* control groups of one version: mount and file names */
    const char *mount, *bound, *used, *files;
} hierarchy;

static const hierarchy version_1 = {"sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "\ntotal_inactive_file"};
static const hierarchy version_2 = {"sys/fs/cgroup", "memory.max", "memory.current", "\ninactive_file"};

/* A group is also charged for cached files.  Inactive ones count as available, as in the machine's MemAvailable. */
static uint64_t left_of_group(const char *group, const hierarchy *of)
{
    const uint64_t bound = host_number_in(group, of->bound, NULL);
    uint64_t used = host_number_in(group, of->used, NULL);
    const uint64_t files = host_number_in(group, "memory.stat", of->files);
    if (bound == UINT64_MAX || used == UINT64_MAX)
        return UINT64_MAX;
    if (files != UINT64_MAX)
        used -= files < used ? files : used;
    const uint64_t usable = bound - bound / 10;
    return usable > used ? usable - used : 0;
}

/* The minimum over the process's group and its ancestors, up to the root of the mount.  In a container the path may be the machine's, which
 * does not exist there; the root of the mount is then the container's group. */
static uint64_t left_of_groups(const char *root, const hierarchy *of, const char *own, size_t length)
{
    char group[MOST_PATH];
    const int base = snprintf(group, sizeof group, "%s/%s", root, of->mount);
    if (base < 0 || (size_t)base + length >= sizeof group)
        return UINT64_MAX;
    memcpy(group + base, own, length);
    group[(size_t)base + length] = 0;
    if (strstr(group + base, "/..") != NULL) /* outside of this process's cgroup namespace */
        group[base] = 0;
    for (uint64_t least = UINT64_MAX;;) {
        const uint64_t left = left_of_group(group, of);
        least = left < least ? left : least;
        char *inner = strrchr(group + base, '/');
        if (inner == NULL)
            return least;
        *inner = 0;
    }
}

/* A line of /proc/self/cgroup is NUMBER:CONTROLLERS:PATH; version 2 names no controllers. */
static uint64_t left_of_line(const char *root, const char *line, size_t length)
{
    static const char memory[] = "memory";
    const char *end = line + length, *first = memchr(line, ':', length);
    const char *second = first != NULL ? memchr(first + 1, ':', (size_t)(end - first - 1)) : NULL;
    if (second == NULL)
        return UINT64_MAX;
    if (second == first + 1)
        return left_of_groups(root, &version_2, second + 1, (size_t)(end - second - 1));
    for (const char *word = first + 1, *next; word <= second; word = next + 1) {
        next = memchr(word, ',', (size_t)(second - word));
        next = next != NULL ? next : second;
        if ((size_t)(next - word) == sizeof memory - 1 && memcmp(word, memory, sizeof memory - 1) == 0)
            return left_of_groups(root, &version_1, second + 1, (size_t)(end - second - 1));
    }
    return UINT64_MAX;
}

static uint64_t left_of_container(const char *root)
{
    char text[MOST_TEXT];
    uint64_t least = UINT64_MAX;
    if (!read_text(root, "proc/self/cgroup", text))
        return left_of_groups(root, &version_2, "", 0);
    for (const char *line = text; *line != 0;) {
        const size_t length = strcspn(line, "\n");
        const uint64_t left = left_of_line(root, line, length);
        least = left < least ? left : least;
        line += length + (line[length] != 0);
    }
    return least;
}

uint64_t nvs_host_left_in(const char *root)
{
    const uint64_t total = host_number_in(root, "proc/meminfo", "MemTotal");
    const uint64_t left = host_number_in(root, "proc/meminfo", "MemAvailable");
    if (total == UINT64_MAX || left == UINT64_MAX)
        return UINT64_MAX;
    const uint64_t keep = total / 10, of_machine = left > keep ? (left - keep) * 1024 : 0;
    const uint64_t of_container = left_of_container(root);
    return of_container < of_machine ? of_container : of_machine;
}

uint64_t nvs_host_system_left(void)
{
    return nvs_host_left_in("");
}

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
    uint64_t node = host_number_in("", path, NULL);
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
