/* Finds libc's dlsym and dlvsym in the loaded libraries' symbol tables, because the hook's own function is called dlsym.
 *
 * They are in libdl.so.2 up to glibc 2.33 and in libc.so.6 from 2.34 on.  All their versions are the same
 * function, so the version is ignored.  No lock, no allocation, no call of a function of libc, which a sanitizer that
 * is just starting may have replaced by one that cannot run yet.  The loader's list is read without its lock: by the
 * first dlsym of the process or by the hook's constructor, before any thread can change it.
 */
#define _GNU_SOURCE /* _r_debug, dladdr1, RTLD_NEXT */
#include "driver/library.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Read by the assembly in resolve.c too: relaxed loads and stores of one aligned word. */
__attribute__((visibility("hidden"))) _Atomic(nvs_dlsym_function *) nvs_real_dlsym;
__attribute__((visibility("hidden"))) _Atomic(nvs_dlvsym_function *) nvs_real_dlvsym;

typedef struct symbol_table {
    uintptr_t base;
    const char *strings, *soname;
    const ElfW(Sym) * symbols;
    const uint32_t *gnu_hash;
} symbol_table;

/* The loader relocates these entries in place on most machines, but not on all. */
static const void *relocated(uintptr_t base, ElfW(Addr) address)
{
    return (const void *)(address >= base ? address : base + address); // NOLINT: addresses from the dynamic section
}

static bool read_dynamic(const struct link_map *library, symbol_table *out)
{
    *out = (symbol_table){.base = library->l_addr};
    ElfW(Xword) soname = 0;
    bool named = false;
    for (const ElfW(Dyn) *entry = library->l_ld; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        const void *address = relocated(out->base, entry->d_un.d_ptr);
        switch (entry->d_tag) {
        case DT_STRTAB: out->strings = address; break;
        case DT_SYMTAB: out->symbols = address; break;
        case DT_GNU_HASH: out->gnu_hash = address; break;
        case DT_SONAME: soname = entry->d_un.d_val; named = true; break;
        default: break;
        }
    }
    if (out->strings == NULL || out->symbols == NULL || !named)
        return false;
    out->soname = out->strings + soname;
    return true;
}

/* Not strcmp: a starting sanitizer calls this dlsym before its strcmp works. */
static bool same(const char *a, const char *b)
{
    while (*a != 0 && *a == *b)
        a++, b++;
    return *a == *b;
}

static bool is_wanted(const symbol_table *table, uint32_t index, const char *name)
{
    const ElfW(Sym) *symbol = &table->symbols[index];
    return symbol->st_shndx != SHN_UNDEF && (symbol->st_info & 0xf) == STT_FUNC &&
           same(table->strings + symbol->st_name, name);
}

/* The address of a function; 0: none. */
static uintptr_t find(const symbol_table *table, const char *name)
{
    const uint32_t buckets = table->gnu_hash[0], first = table->gnu_hash[1], bloom_words = table->gnu_hash[2];
    const uint32_t *bucket = table->gnu_hash + 4 + bloom_words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = bucket + buckets;
    uint32_t hash = 5381;
    for (const unsigned char *at = (const unsigned char *)name; *at != 0; at++)
        hash = hash * 33 + *at;
    uint32_t index = buckets != 0 ? bucket[hash % buckets] : 0;
    if (index < first)
        return 0;
    for (;; index++) {
        const uint32_t link = chain[index - first];
        if ((link | 1) == (hash | 1) && is_wanted(table, index, name))
            return table->base + table->symbols[index].st_value;
        if ((link & 1) != 0)
            return 0;
    }
}

static bool look_into(const struct link_map *library)
{
    symbol_table table;
    if (!read_dynamic(library, &table) || table.gnu_hash == NULL)
        return false;
    if (!same(table.soname, "libc.so.6") && !same(table.soname, "libdl.so.2"))
        return false;
    const uintptr_t dlsym_address = find(&table, "dlsym"), dlvsym_address = find(&table, "dlvsym");
    if (dlsym_address == 0 || dlvsym_address == 0)
        return false;
    /* Relaxed: publishes no other data; every thread stores the same value. */
    atomic_store_explicit(&nvs_real_dlvsym, (nvs_dlvsym_function *)dlvsym_address, memory_order_relaxed);
    atomic_store_explicit(&nvs_real_dlsym, (nvs_dlsym_function *)dlsym_address, memory_order_relaxed);
    return true;
}

static void look_around(void)
{
    const struct link_map *library = _r_debug.r_map;
    while (library != NULL && !look_into(library))
        library = library->l_next;
}

nvs_dlsym_function *nvs_libc_dlsym(void)
{
    if (atomic_load_explicit(&nvs_real_dlsym, memory_order_relaxed) == NULL)
        look_around();
    return atomic_load_explicit(&nvs_real_dlsym, memory_order_relaxed);
}

nvs_dlvsym_function *nvs_libc_dlvsym(void)
{
    if (atomic_load_explicit(&nvs_real_dlvsym, memory_order_relaxed) == NULL)
        look_around();
    return atomic_load_explicit(&nvs_real_dlvsym, memory_order_relaxed);
}

__attribute__((constructor)) static void at_load(void)
{
    nvs_libc_dlsym();
}

static _Atomic(void *) driver; /* handle of libcuda.so.1; never closed, so the driver stays loaded */

/* A profiler's dlopen answers with the first library that has the driver's functions: the hook.  The next library is the driver or the profiler. */
static void *not_the_hook(void *handle)
{
    return handle != NULL && ((const struct link_map *)handle)->l_ld == _DYNAMIC ? RTLD_NEXT : handle;
}

static void *driver_handle(void)
{
    /* Relaxed: an opaque word; every thread stores the same value. */
    void *handle = atomic_load_explicit(&driver, memory_order_relaxed);
    if (handle != NULL)
        return handle;
    handle = not_the_hook(dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY));
    if (handle == NULL)
        dlerror(); /* clears the hook's error, not the application's */
    else
        atomic_store_explicit(&driver, handle, memory_order_relaxed);
    return handle;
}

bool nvs_driver_loaded(void)
{
    return driver_handle() != NULL;
}

void *nvs_driver_symbol(const char *name)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    if (real == NULL)
        return NULL;
    void *handle = driver_handle();
    /* Without libcuda.so.1, searches the libraries after the hook: a driver may have another name. */
    void *address = real(handle != NULL ? handle : RTLD_NEXT, name);
    if (address == NULL)
        dlerror();
    return address;
}

const char *nvs_driver_file(const void *address)
{
    struct link_map *library = NULL;
    symbol_table table;
    Dl_info ignored;
    const bool found = dladdr1(address, &ignored, (void **)&library, RTLD_DL_LINKMAP) != 0 && read_dynamic(library, &table);
    return found && same(table.soname, "libcuda.so.1") ? library->l_name : NULL;
}
