/* Images of modules: an ELF file for CUDA, a fat binary, or PTX text.  They are not run.
 *
 * A function must have a section .text.NAME in a cubin, or an .entry NAME in PTX.  A fat binary may be compressed: it has every name.
 */
#include "module/module.h"

#include <elf.h>
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

static bool same_name(const char *text, size_t length, const char *name)
{
    return strlen(name) == length && memcmp(text, name, length) == 0;
}

static bool ptx_has(const sim_image *image, const char *name)
{
    for (const char *at = image->bytes; (at = strstr(at, ".entry")) != NULL;) {
        at += strlen(".entry");
        at += strspn(at, " \t\r\n");
        if (same_name(at, strcspn(at, " \t\r\n({"), name))
            return true;
    }
    return false;
}

static bool cubin_has(const sim_image *image, const char *name)
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
        const char *text = image->bytes + names.sh_offset + section.sh_name;
        if (section.sh_name < names.sh_size && strncmp(text, ".text.", 6) == 0 && strcmp(text + 6, name) == 0)
            return true;
    }
    return false;
}

bool nvs_sim_image_has(const sim_image *image, const char *name)
{
    return image->kind == IMAGE_FATBIN || (image->kind == IMAGE_PTX ? ptx_has(image, name) : cubin_has(image, name));
}
