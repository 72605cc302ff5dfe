/* How much host memory is left: of the machine, and of the container. */
#include "host_system.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

uint64_t nvs_host_number_in(const char *root, const char *name, const char *word)
{
    char text[8192], path[512];
    if ((size_t)snprintf(path, sizeof path, "%s/%s", root, name) >= sizeof path)
        return UINT64_MAX;
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

/* A container is charged for files that its programs have read, too.  Those not in use make room by themselves, as they do in
 * the machine's MemAvailable. */
static uint64_t left_of_container(const char *root)
{
    const uint64_t bound = nvs_host_number_in(root, "sys/fs/cgroup/memory.max", NULL);
    uint64_t used = nvs_host_number_in(root, "sys/fs/cgroup/memory.current", NULL);
    const uint64_t files = nvs_host_number_in(root, "sys/fs/cgroup/memory.stat", "\ninactive_file");
    if (bound == UINT64_MAX || used == UINT64_MAX)
        return UINT64_MAX;
    if (files != UINT64_MAX)
        used -= files < used ? files : used;
    const uint64_t usable = bound - bound / 10;
    return usable > used ? usable - used : 0;
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
