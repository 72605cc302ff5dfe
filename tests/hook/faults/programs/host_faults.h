/* Failures of the hook's own requests to the system: fault_sweep.c puts these functions into the hook's table of addresses. */
#ifndef HOST_FAULTS_H
#define HOST_FAULTS_H

#include <elf.h>
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

static unsigned host_calls, host_from, host_to; /* which of the hook's requests fail */

static bool refused(void)
{
    /* Relaxed: numbers only; threads of the hook's ask too. */
    const unsigned number = __atomic_add_fetch(&host_calls, 1, __ATOMIC_RELAXED);
    return number >= __atomic_load_n(&host_from, __ATOMIC_RELAXED) && number <= __atomic_load_n(&host_to, __ATOMIC_RELAXED);
}

static void *our_malloc(size_t size) { return refused() ? NULL : malloc(size); }
static void *our_calloc(size_t count, size_t size) { return refused() ? NULL : calloc(count, size); }
static void *our_realloc(void *old, size_t size) { return refused() ? NULL : realloc(old, size); }
static int our_memalign(void **out, size_t align, size_t size) { return refused() ? ENOMEM : posix_memalign(out, align, size); }
static void *our_mmap(void *at, size_t size, int rights, int flags, int file, off_t offset)
{
    return refused() ? MAP_FAILED : mmap(at, size, rights, flags, file, offset);
}
static int our_thread(pthread_t *out, const pthread_attr_t *attributes, void *(*start)(void *), void *argument)
{
    return refused() ? EAGAIN : pthread_create(out, attributes, start, argument);
}
static int our_eventfd(unsigned int first, int flags)
{
    return refused() ? (errno = EMFILE, -1) : eventfd(first, flags);
}
static int our_socket(int domain, int type, int protocol)
{
    return refused() ? (errno = EMFILE, -1) : socket(domain, type, protocol);
}

static const struct replacement {
    const char *name;
    uintptr_t ours;
} replacements[] = {
    {"malloc", (uintptr_t)our_malloc},         {"calloc", (uintptr_t)our_calloc}, {"realloc", (uintptr_t)our_realloc},
    {"posix_memalign", (uintptr_t)our_memalign}, {"mmap", (uintptr_t)our_mmap},     {"pthread_create", (uintptr_t)our_thread},
    {"eventfd", (uintptr_t)our_eventfd},       {"socket", (uintptr_t)our_socket},
};
static unsigned replaced;

static void replace(uintptr_t place, const char *name)
{
    const uintptr_t page = place & ~(uintptr_t)(sysconf(_SC_PAGESIZE) - 1);
    for (unsigned i = 0; i < sizeof replacements / sizeof replacements[0]; i++)
        if (strcmp(name, replacements[i].name) == 0 &&
            mprotect((void *)page, 2 * (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE) == 0) {
            *(uintptr_t *)place = replacements[i].ours;
            replaced++;
        }
}

/* In the hook's own table of addresses: nobody else's requests fail. */
static int enter_hook(struct dl_phdr_info *info, size_t size, void *unused)
{
    const ElfW(Dyn) *entry = NULL;
    const ElfW(Rela) *tables[2] = {NULL, NULL};
    const ElfW(Sym) *symbols = NULL;
    const char *strings = NULL;
    size_t bytes[2] = {0, 0};
    (void)size, (void)unused;
    if (strstr(info->dlpi_name, "libnvshare_hook") == NULL)
        return 0;
    for (unsigned i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_DYNAMIC)
            entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[i].p_vaddr);
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        const uintptr_t value = entry->d_un.d_ptr, address = value >= info->dlpi_addr ? value : info->dlpi_addr + value;
        switch (entry->d_tag) {
        case DT_STRTAB: strings = (const char *)address; break;
        case DT_SYMTAB: symbols = (const ElfW(Sym) *)address; break;
        case DT_RELA: tables[0] = (const ElfW(Rela) *)address; break;
        case DT_JMPREL: tables[1] = (const ElfW(Rela) *)address; break;
        case DT_RELASZ: bytes[0] = value; break;
        case DT_PLTRELSZ: bytes[1] = value; break;
        default: break;
        }
    }
    for (unsigned table = 0; table < 2; table++)
        for (size_t i = 0; tables[table] != NULL && i < bytes[table] / sizeof(ElfW(Rela)); i++) {
            const ElfW(Sym) *symbol = &symbols[ELF64_R_SYM(tables[table][i].r_info)];
            if (ELF64_R_SYM(tables[table][i].r_info) != 0 && symbol->st_shndx == SHN_UNDEF)
                replace(info->dlpi_addr + tables[table][i].r_offset, strings + symbol->st_name);
        }
    return 1;
}

#endif
