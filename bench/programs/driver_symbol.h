/* The driver's own functions, past whatever answers dlsym(): read from the symbol table of libcuda.so in memory.
 *
 * Included by programs of the benchmarks that call the driver both through the hook and past it; wants _GNU_SOURCE.
 */
#ifndef NVSHARE_BENCH_DRIVER_SYMBOL_H
#define NVSHARE_BENCH_DRIVER_SYMBOL_H

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <string.h>

/* Called for each function that the driver exports, until it returns something else than 0. */
typedef int driver_visit(const char *name, void *address, void *argument);

typedef struct driver_search {
    driver_visit *visit;
    void *argument;
} driver_search;

static int driver_look_into(struct dl_phdr_info *object, size_t size, void *argument)
{
    const driver_search *search = argument;
    const ElfW(Sym) *symbols = NULL;
    const char *names = NULL;
    (void)size;
    if (strstr(object->dlpi_name, "libcuda.so") == NULL)
        return 0;
    for (int i = 0; i < object->dlpi_phnum; i++) {
        if (object->dlpi_phdr[i].p_type != PT_DYNAMIC)
            continue;
        const ElfW(Dyn) *entry = (const void *)(object->dlpi_addr + object->dlpi_phdr[i].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) {
            if (entry->d_tag == DT_SYMTAB)
                symbols = (const void *)entry->d_un.d_ptr;
            else if (entry->d_tag == DT_STRTAB)
                names = (const void *)entry->d_un.d_ptr;
        }
    }
    if (symbols == NULL || names == NULL)
        return 0;
    /* The string table follows the symbol table in every linker's output. */
    for (const ElfW(Sym) *one = symbols; (const char *)(one + 1) <= names; one++) {
        if (one->st_shndx == SHN_UNDEF || one->st_name == 0 || (one->st_info & 0xf) != STT_FUNC)
            continue;
        const int told = search->visit(names + one->st_name, (void *)(object->dlpi_addr + one->st_value), search->argument);
        if (told != 0)
            return told;
    }
    return 0;
}

/* What `visit` returned last; 0 also where no driver is loaded. */
static int driver_each_symbol(driver_visit *visit, void *argument)
{
    driver_search search = {visit, argument};
    return dl_iterate_phdr(driver_look_into, &search);
}

#endif
