/* How much host memory is left: of the machine, and of the control groups that the process is in (both versions, nested). */
#include "host/left.h"

#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

uint64_t nvs_host_number_in(const char *root, const char *name, const char *word)
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
    const uint64_t bound = nvs_host_number_in(group, of->bound, NULL);
    uint64_t used = nvs_host_number_in(group, of->used, NULL);
    const uint64_t files = nvs_host_number_in(group, "memory.stat", of->files);
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
    const uint64_t total = nvs_host_number_in(root, "proc/meminfo", "MemTotal");
    const uint64_t left = nvs_host_number_in(root, "proc/meminfo", "MemAvailable");
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
