/* Libraries that are opened with RTLD_DEEPBIND: their references bind to themselves and to the libraries that they are linked with
 * before the process's global symbols, where the hook's are.  So they would bypass the hook to libcuda's functions and libc's dlsym.
 *
 * The hook's dlopen passes other calls to libc's, with the caller's return address.  After a call with that flag it walks the relocations
 * of the libraries that the call loaded.  References to functions of the driver, of NVML, and to dlsym, dlvsym and dlopen are bound to
 * the hook's, as they would have been without the flag.  Calls of such a library's constructors bypass the hook.
 *
 * The caller's RUNPATH is searched here, because libc sees the hook as the caller.
 *
 * Locks: the loader's own, in dl_iterate_phdr; no symbol is looked up while it is held.
 */
#define _GNU_SOURCE /* dl_iterate_phdr, dladdr1, RTLD_NEXT */
#include "driver/cuda_api.h"
#include "driver/library.h"
#include "driver/nvml.h"

#include <dlfcn.h>
#include <elf.h>
#include <limits.h>
#include <link.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { WORD_RELOCATION = R_X86_64_64, DATA_RELOCATION = R_X86_64_GLOB_DAT, CALL_RELOCATION = R_X86_64_JUMP_SLOT };
#elif defined(__aarch64__)
enum { WORD_RELOCATION = R_AARCH64_ABS64, DATA_RELOCATION = R_AARCH64_GLOB_DAT, CALL_RELOCATION = R_AARCH64_JUMP_SLOT };
#endif

enum { LOOK_UPS = 3 }; /* dlsym, dlvsym, dlopen */

typedef void *dlopen_function(const char *file, int mode);

/* Read by the assembly below too.  Relaxed: one word; every thread stores the same value. */
__attribute__((visibility("hidden"))) _Atomic(dlopen_function *) nvs_real_dlopen;

void *dlopen(const char *file, int mode);
static const char *const look_up_names[LOOK_UPS] = {"dlsym", "dlvsym", "dlopen"};

typedef struct binding { /* the new target of references to a name; NULL: unchanged */
    bool referred;
    void *ours;
} binding;

typedef struct bindings {
    uintptr_t first; /* the opened library: visits begin there in the loader's list */
    bool reached, patch;
    binding cuda[NVS_ID_COUNT], nvml[NVS_NVML_COUNT], look_ups[LOOK_UPS];
} bindings;

static binding *find_binding(bindings *all, const char *name)
{
    if (name[0] == 'c') {
        nvs_id id = nvs_id_of_name(name);
        return id != NVS_ID_COUNT && nvs_entries[id].wrapper != NULL ? &all->cuda[id] : NULL;
    }
    if (name[0] == 'n') {
        nvs_nvml_id id = nvs_nvml_id_of_name(name);
        return id != NVS_NVML_COUNT ? &all->nvml[id] : NULL;
    }
    for (unsigned i = 0; i < LOOK_UPS; i++)
        if (strcmp(name, look_up_names[i]) == 0)
            return &all->look_ups[i];
    return NULL;
}

/* --- one library's relocations --- */

typedef struct image {
    uintptr_t base, relro, relro_end; /* relro: the part that the loader has made read-only */
    const char *strings;
    const ElfW(Sym) * symbols;
    const ElfW(Rela) * tables[2]; /* of data and of calls */
    size_t bytes[2];
} image;

static bool read_image(const struct dl_phdr_info *info, image *out)
{
    const ElfW(Dyn) *entry = NULL;
    ElfW(Sxword) call_kind = DT_RELA;
    *out = (image){.base = info->dlpi_addr};
    for (unsigned i = 0; i < info->dlpi_phnum; i++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[i];
        if (header->p_type == PT_DYNAMIC)
            entry = (const ElfW(Dyn) *)(info->dlpi_addr + header->p_vaddr); // NOLINT: an address of the loader
        if (header->p_type == PT_GNU_RELRO) {
            out->relro = info->dlpi_addr + header->p_vaddr;
            out->relro_end = out->relro + header->p_memsz;
        }
    }
    for (; entry != NULL && entry->d_tag != DT_NULL; entry++) {
        const uintptr_t value = entry->d_un.d_ptr, address = value >= out->base ? value : out->base + value;
        switch (entry->d_tag) {
        case DT_STRTAB: out->strings = (const char *)address; break;              // NOLINT: as above
        case DT_SYMTAB: out->symbols = (const ElfW(Sym) *)address; break;         // NOLINT: as above
        case DT_RELA: out->tables[0] = (const ElfW(Rela) *)address; break;        // NOLINT: as above
        case DT_JMPREL: out->tables[1] = (const ElfW(Rela) *)address; break;      // NOLINT: as above
        case DT_RELASZ: out->bytes[0] = value; break;
        case DT_PLTRELSZ: out->bytes[1] = value; break;
        case DT_PLTREL: call_kind = (ElfW(Sxword))value; break;
        default: break;
        }
    }
    return out->strings != NULL && out->symbols != NULL && call_kind == DT_RELA;
}

static void store(const image *of, uintptr_t place, void *value)
{
    const uintptr_t size = (uintptr_t)sysconf(_SC_PAGESIZE), page = place & ~(size - 1);
    const bool closed = place >= (of->relro & ~(size - 1)) && place < (of->relro_end & ~(size - 1));
    if (closed && mprotect((void *)page, size, PROT_READ | PROT_WRITE) != 0) // NOLINT: as above
        return;
    /* Relaxed: a call through it runs the old function or the new one; both work. */
    atomic_store_explicit((_Atomic(void *) *)place, value, memory_order_relaxed); // NOLINT: as above
    if (closed)
        (void)mprotect((void *)page, size, PROT_READ); // NOLINT: as above
}

static void look_at(bindings *all, const image *of, const ElfW(Rela) * relocation)
{
    const uint32_t type = ELF64_R_TYPE(relocation->r_info);
    if ((type != WORD_RELOCATION && type != DATA_RELOCATION && type != CALL_RELOCATION) || relocation->r_addend != 0)
        return;
    const ElfW(Sym) *symbol = &of->symbols[ELF64_R_SYM(relocation->r_info)];
    if (symbol->st_shndx != SHN_UNDEF) /* defined by the library itself */
        return;
    binding *found = find_binding(all, of->strings + symbol->st_name);
    if (found == NULL)
        return;
    if (!all->patch)
        found->referred = true;
    else if (found->ours != NULL)
        store(of, of->base + relocation->r_offset, found->ours);
}

static int visit(struct dl_phdr_info *info, size_t size, void *argument)
{
    bindings *all = argument;
    image of;
    (void)size;
    all->reached |= info->dlpi_addr == all->first;
    if (!all->reached || !read_image(info, &of))
        return 0;
    for (unsigned table = 0; table < 2; table++)
        for (size_t i = 0; of.tables[table] != NULL && i < of.bytes[table] / sizeof(ElfW(Rela)); i++)
            look_at(all, &of, &of.tables[table][i]);
    return 0;
}

/* --- the new targets --- */

/* A name counts if those libraries find the real function, and not their own, by it. */
static void decide(bindings *all, void *handle)
{
    nvs_dlsym_function *real = nvs_libc_dlsym();
    for (unsigned id = 0; id < NVS_ID_COUNT; id++)
        if (all->cuda[id].referred && real(handle, nvs_entries[id].name) == nvs_driver_symbol(nvs_entries[id].name))
            all->cuda[id].ours = nvs_as_address(nvs_entries[id].wrapper);
    for (unsigned id = 0; id < NVS_NVML_COUNT; id++)
        if (all->nvml[id].referred && nvs_nvml_found((nvs_nvml_id)id, handle))
            all->nvml[id].ours = nvs_nvml_wrapper((nvs_nvml_id)id);
    void *const ours[LOOK_UPS] = {nvs_as_address((nvs_function)dlsym), nvs_as_address((nvs_function)dlvsym),
                                  nvs_as_address((nvs_function)dlopen)};
    for (unsigned i = 0; i < LOOK_UPS; i++)
        all->look_ups[i].ours = ours[i];
    (void)dlerror(); /* clears the hook's error, not the application's */
}

static void bind_to_us(void *handle)
{
    bindings *all = calloc(1, sizeof *all);
    if (all == NULL || nvs_libc_dlsym() == NULL)
        goto out;
    all->first = ((const struct link_map *)handle)->l_addr;
    dl_iterate_phdr(visit, all);
    decide(all, handle);
    all->patch = true;
    all->reached = false;
    dl_iterate_phdr(visit, all);
out:
    free(all);
}

/* --- finding the library as libc would for the caller --- */

/* libc's search path for a library that the code at this address opens; NULL: not known.  The caller frees it. */
static Dl_serinfo *search_path(const void *address)
{
    struct link_map *map = NULL;
    Dl_info ignored;
    Dl_serinfo head, *path = NULL;
    if (dladdr1(address, &ignored, (void **)&map, RTLD_DL_LINKMAP) == 0 || dlinfo(map, RTLD_DI_SERINFOSIZE, &head) != 0)
        return NULL;
    path = malloc(head.dls_size);
    if (path == NULL || dlinfo(map, RTLD_DI_SERINFOSIZE, path) != 0 || dlinfo(map, RTLD_DI_SERINFO, path) != 0) {
        free(path);
        return NULL;
    }
    return path;
}

static bool has_directory(const Dl_serinfo *path, const char *name)
{
    for (unsigned i = 0; i < path->dls_cnt; i++)
        if (strcmp(path->dls_serpath[i].dls_name, name) == 0)
            return true;
    return false;
}

/* Searches the directories of the caller alone, its RUNPATH.  False: libc finds the same library for the hook as for the caller. */
static bool search(const char *file, const void *caller, char *out, size_t size)
{
    Dl_serinfo *theirs = search_path(caller), *ours = search_path((const void *)(uintptr_t)&search); // NOLINT: as above
    bool found = false;
    for (unsigned i = 0; theirs != NULL && ours != NULL && !found && i < theirs->dls_cnt; i++) {
        const char *directory = theirs->dls_serpath[i].dls_name;
        int length = has_directory(ours, directory) ? -1 : snprintf(out, size, "%s/%s", directory, file);
        found = length > 0 && (size_t)length < size && access(out, R_OK) == 0;
    }
    free(theirs);
    free(ours);
    return found;
}

/* Reached from dlopen below by a jump: the return address is the caller's. */
__attribute__((visibility("hidden"), used)) void *nvs_dlopen_deepbind(const char *file, int mode)
{
    const void *caller = __builtin_return_address(0);
    dlopen_function *real = atomic_load_explicit(&nvs_real_dlopen, memory_order_relaxed); /* see its declaration */
    char path[PATH_MAX];
    void *handle = NULL;
    const bool plain = file != NULL && strchr(file, '/') == NULL && strchr(file, '$') == NULL;
    if (plain && (handle = real(file, mode | RTLD_NOLOAD)) == NULL && (mode & RTLD_NOLOAD) == 0 &&
        search(file, caller, path, sizeof path))
        handle = real(path, mode);
    if (handle == NULL)
        handle = real(file, mode);
    if (handle != NULL)
        bind_to_us(handle);
    return handle;
}

__attribute__((visibility("hidden"), used)) void nvs_find_dlopen(void)
{
    nvs_dlsym_function *look_up = nvs_libc_dlsym();
    void *found = look_up != NULL ? look_up(RTLD_NEXT, "dlopen") : NULL;
    dlopen_function *real;
    memcpy(&real, &found, sizeof real); /* POSIX guarantees it */
    atomic_store_explicit(&nvs_real_dlopen, real, memory_order_relaxed); /* see its declaration */
}

__attribute__((constructor)) static void at_load(void)
{
    nvs_find_dlopen();
}

/* dlopen: without the flag a jump to libc's, which then sees the caller's return address. */
#if defined(__x86_64__)
__asm__(".text\n"
        ".balign 16\n"
        ".globl dlopen\n"
        ".type dlopen,@function\n"
        "dlopen:\n"
        "  .cfi_startproc\n"
        "1: movq nvs_real_dlopen(%rip), %rax\n"
        "  testq %rax, %rax\n"
        "  jz 2f\n"
        "  testl $8, %esi\n" /* RTLD_DEEPBIND */
        "  jnz nvs_dlopen_deepbind\n"
        "  jmp *%rax\n"
        "2: subq $24, %rsp\n"
        "  .cfi_adjust_cfa_offset 24\n"
        "  movq %rdi, (%rsp)\n"
        "  movq %rsi, 8(%rsp)\n"
        "  call nvs_find_dlopen\n"
        "  movq (%rsp), %rdi\n"
        "  movq 8(%rsp), %rsi\n"
        "  addq $24, %rsp\n"
        "  .cfi_adjust_cfa_offset -24\n"
        "  cmpq $0, nvs_real_dlopen(%rip)\n"
        "  jne 1b\n"
        "  xorl %eax, %eax\n" /* a libc without dlopen */
        "  ret\n"
        "  .cfi_endproc\n"
        ".size dlopen, .-dlopen\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".balign 16\n"
        ".globl dlopen\n"
        ".type dlopen,@function\n"
        "dlopen:\n"
        "  .cfi_startproc\n"
        "1: adrp x9, nvs_real_dlopen\n"
        "  ldr x9, [x9, #:lo12:nvs_real_dlopen]\n"
        "  cbz x9, 2f\n"
        "  tbnz w1, #3, 3f\n" /* RTLD_DEEPBIND */
        "  br x9\n"
        "3: b nvs_dlopen_deepbind\n"
        "2: stp x29, x30, [sp, #-32]!\n"
        "  .cfi_def_cfa_offset 32\n"
        "  .cfi_offset 29, -32\n"
        "  .cfi_offset 30, -24\n"
        "  stp x0, x1, [sp, #16]\n"
        "  bl nvs_find_dlopen\n"
        "  ldp x0, x1, [sp, #16]\n"
        "  ldp x29, x30, [sp], #32\n"
        "  .cfi_restore 29\n"
        "  .cfi_restore 30\n"
        "  .cfi_def_cfa_offset 0\n"
        "  adrp x9, nvs_real_dlopen\n"
        "  ldr x9, [x9, #:lo12:nvs_real_dlopen]\n"
        "  cbnz x9, 1b\n"
        "  mov x0, #0\n"
        "  ret\n"
        "  .cfi_endproc\n"
        ".size dlopen, .-dlopen\n");
#endif
