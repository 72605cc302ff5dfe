/* The writable memory of the process that in_process.c looks through: segments of loaded objects, the heap, anonymous mappings.
 *
 * The driver and two objects that the caller names are left out.
 */
#ifndef NVSHARE_BENCH_MEMORY_RANGES_H
#define NVSHARE_BENCH_MEMORY_RANGES_H

#include <link.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_RANGES = 8192, MAX_LEFT_OUT = 64, STACK_GUARD_MAX = 1 << 16 };

typedef struct range {
    uintptr_t from, to;
    bool sealed; /* may not be written to directly */
    bool anonymous; /* may have pages that nobody has touched */
} range;

static range ranges[MAX_RANGES];
static unsigned range_count;
static range left_out[MAX_LEFT_OUT]; /* /proc/self/maps shows their .bss as anonymous */
static unsigned left_out_count;

static void add_range(uintptr_t from, uintptr_t to, bool sealed, bool anonymous)
{
    from = (from + sizeof(uintptr_t) - 1) & ~(uintptr_t)(sizeof(uintptr_t) - 1);
    if (from < to && range_count < MAX_RANGES)
        ranges[range_count++] = (range){from, to, sealed, anonymous};
}

static bool inside(const struct dl_phdr_info *object, uintptr_t address)
{
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_LOAD && address - (object->dlpi_addr + part->p_vaddr) < part->p_memsz)
            return true;
    }
    return false;
}

/* `argument`: one address in each of the two objects that are left out beside the driver. */
static int add_object(struct dl_phdr_info *object, size_t size, void *argument)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t sealed_from = 0, sealed_to = 0;
    const uintptr_t *left = argument;
    (void)size;
    const bool excluded = strstr(object->dlpi_name, "libcuda.so") != NULL || inside(object, left[0]) || inside(object, left[1]);
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type == PT_GNU_RELRO) {
            sealed_from = object->dlpi_addr + part->p_vaddr;
            sealed_to = (sealed_from + part->p_memsz) & ~(page - 1);
        }
    }
    for (int i = 0; i < object->dlpi_phnum; i++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[i];
        if (part->p_type != PT_LOAD || !(part->p_flags & PF_W))
            continue;
        const uintptr_t from = object->dlpi_addr + part->p_vaddr, to = from + part->p_memsz;
        if (excluded) {
            if (left_out_count == MAX_LEFT_OUT)
                return 1;
            left_out[left_out_count++] = (range){from & ~(page - 1), (to + page - 1) & ~(page - 1), false, false};
            continue;
        }
        const bool seals = sealed_from >= from && sealed_from < to;
        if (seals) {
            add_range(from, sealed_from, false, false);
            add_range(sealed_from, sealed_to < to ? sealed_to : to, true, false);
        }
        add_range(seals ? (sealed_to < to ? sealed_to : to) : from, to, false, true);
    }
    return 0;
}

static bool add_anonymous(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    char *line = NULL;
    size_t room = 0;
    unsigned long before_from = 0, before_to = 0;
    bool before_guards = false;
    if (maps == NULL)
        return false;
    while (getline(&line, &room, maps) > 0) {
        unsigned long from, to;
        char access[5], path[32] = "";
        if (sscanf(line, "%lx-%lx %4s %*s %*s %*s %31s", &from, &to, access, path) < 3)
            continue;
        const bool anonymous = path[0] == '\0' || strncmp(path, "[heap", 5) == 0 || strncmp(path, "[anon", 5) == 0;
        const bool stack = before_guards && before_to == from && before_to - before_from <= STACK_GUARD_MAX;
        if (anonymous && !stack && strncmp(access, "rw", 2) == 0 && access[3] == 'p')
            add_range(from, to, false, true);
        before_from = from;
        before_to = to;
        before_guards = anonymous && strncmp(access, "---p", 4) == 0;
    }
    free(line);
    fclose(maps);
    return true;
}

#endif
