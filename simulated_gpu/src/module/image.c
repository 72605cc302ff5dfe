/* Images of modules.  They are not run.
 *
 * An image must look like one: ELF for CUDA, a fat binary, or PTX text.  Names of functions are checked where the image shows them:
 * section .text.NAME of a cubin, .entry NAME of PTX.  A fat binary may be compressed, so any name is found there.
 */
#include "module/module.h"

#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FATBIN_MAGIC 0xba55ed50u
#define FATBIN_WRAPPER_MAGIC 0x466243b1u

static CUresult measure(const void *image, size_t *bytes, enum sim_image_kind *kind)
{
    uint32_t first;
    memcpy(&first, image, sizeof first);
    if (memcmp(image, ELFMAG, SELFMAG) == 0) {
        Elf64_Ehdr header;
        memcpy(&header, image, sizeof header);
        if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != 190 /* CUDA */)
            return CUDA_ERROR_INVALID_IMAGE;
        *kind = IMAGE_CUBIN;
        *bytes = header.e_shoff + (size_t)header.e_shentsize * header.e_shnum;
        size_t segments = header.e_phoff + (size_t)header.e_phentsize * header.e_phnum;
        if (segments > *bytes)
            *bytes = segments;
        return CUDA_SUCCESS;
    }
    if (first == FATBIN_MAGIC) {
        *kind = IMAGE_FATBIN;
        *bytes = 0;
        return CUDA_SUCCESS;
    }
    if (strstr(image, ".version") != NULL && strstr(image, ".target") != NULL) {
        *kind = IMAGE_PTX;
        *bytes = strlen(image) + 1;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_INVALID_IMAGE;
}

CUresult nvs_sim_image_copy(const void *image, sim_image *out)
{
    uint32_t first;
    if (image == NULL)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&first, image, sizeof first);
    if (first == FATBIN_WRAPPER_MAGIC) {
        memcpy(&image, (const char *)image + 8, sizeof image);
        if (image == NULL)
            return CUDA_ERROR_INVALID_IMAGE;
    }
    *out = (sim_image){0};
    CUresult result = measure(image, &out->size, &out->kind);
    if (result != CUDA_SUCCESS || out->size == 0)
        return result;
    out->bytes = malloc(out->size);
    if (out->bytes == NULL)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(out->bytes, image, out->size);
    return CUDA_SUCCESS;
}

CUresult nvs_sim_image_from_file(const char *path, char **out)
{
    FILE *file = fopen(path, "rb");
    char *bytes = NULL;
    size_t used = 0, room = 0;
    if (file == NULL)
        return CUDA_ERROR_FILE_NOT_FOUND;
    for (;;) {
        if (room - used < 4096) {
            room = room == 0 ? 65536 : room * 2;
            char *larger = realloc(bytes, room);
            if (larger == NULL) {
                free(bytes);
                fclose(file);
                return CUDA_ERROR_OUT_OF_MEMORY;
            }
            bytes = larger;
        }
        size_t got = fread(bytes + used, 1, room - used - 64, file); /* zeros follow the image */
        if (got == 0)
            break;
        used += got;
    }
    memset(bytes + used, 0, 64);
    fclose(file);
    *out = bytes;
    return CUDA_SUCCESS;
}

static bool ptx_names(const sim_image *image, bool (*visit)(const char *name, size_t length, void *argument), void *argument)
{
    for (const char *at = image->bytes; (at = strstr(at, ".entry")) != NULL;) {
        at += strlen(".entry");
        at += strspn(at, " \t\r\n");
        size_t length = strcspn(at, " \t\r\n({");
        if (length != 0 && visit(at, length, argument))
            return true;
    }
    return false;
}

static bool cubin_names(const sim_image *image, bool (*visit)(const char *name, size_t length, void *argument), void *argument)
{
    Elf64_Ehdr header;
    Elf64_Shdr names, section;
    memcpy(&header, image->bytes, sizeof header);
    if (header.e_shentsize != sizeof section || header.e_shstrndx >= header.e_shnum)
        return false;
    memcpy(&names, image->bytes + header.e_shoff + header.e_shstrndx * sizeof names, sizeof names);
    if (names.sh_offset + names.sh_size > image->size)
        return false;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image->bytes + header.e_shoff + i * sizeof section, sizeof section);
        if (section.sh_name >= names.sh_size)
            continue;
        const char *name = image->bytes + names.sh_offset + section.sh_name;
        if (strncmp(name, ".text.", 6) == 0 && visit(name + 6, strlen(name + 6), argument))
            return true;
    }
    return false;
}

bool nvs_sim_image_names(const sim_image *image, bool (*visit)(const char *name, size_t length, void *argument), void *argument)
{
    switch (image->kind) {
    case IMAGE_PTX: return ptx_names(image, visit, argument);
    case IMAGE_CUBIN: return cubin_names(image, visit, argument);
    default: return false;
    }
}
