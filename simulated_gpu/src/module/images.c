/* Images: an ELF file for CUDA (a cubin), a fat binary, or PTX text.
 *
 * Images are not run.  A function has a section .text.NAME in a cubin, or an .entry NAME in PTX; its parameters are in the section
 * .nv.info.NAME, or in the text.  A fat binary may be compressed, so that nothing in it is read: it has every name, and lists none.
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

static bool same(const char *text, size_t length, const char *name) { return strlen(name) == length && memcmp(text, name, length) == 0; }

static bool ptx_next(const sim_image *image, size_t *at, const char **name, size_t *length)
{
    const char *entry = strstr(image->bytes + *at, ".entry");
    if (entry == NULL)
        return false;
    entry += strlen(".entry");
    *name = entry + strspn(entry, " \t\r\n");
    *length = strcspn(*name, " \t\r\n({");
    *at = (size_t)(*name - image->bytes);
    return true;
}

/* Section `index` of a cubin; NULL: there is none. */
static const char *cubin_section(const sim_image *image, size_t index, Elf64_Shdr *section)
{
    Elf64_Ehdr header;
    Elf64_Shdr names;
    memcpy(&header, image->bytes, sizeof header);
    if (header.e_shentsize != sizeof *section || header.e_shstrndx >= header.e_shnum || index >= header.e_shnum)
        return NULL;
    memcpy(&names, image->bytes + header.e_shoff + header.e_shstrndx * sizeof names, sizeof names);
    memcpy(section, image->bytes + header.e_shoff + index * sizeof *section, sizeof *section);
    if (names.sh_offset + names.sh_size > image->size)
        return NULL;
    return section->sh_name < names.sh_size ? image->bytes + names.sh_offset + section->sh_name : "";
}

static bool cubin_next(const sim_image *image, size_t *at, const char **name, size_t *length)
{
    Elf64_Shdr section;
    for (const char *text; (text = cubin_section(image, *at, &section)) != NULL;) {
        ++*at;
        if (strncmp(text, ".text.", 6) == 0) {
            *name = text + 6;
            *length = strlen(*name);
            return true;
        }
    }
    return false;
}

bool nvs_sim_image_next(const sim_image *image, size_t *at, const char **name, size_t *length)
{
    if (image->kind == IMAGE_FATBIN)
        return false;
    return image->kind == IMAGE_PTX ? ptx_next(image, at, name, length) : cubin_next(image, at, name, length);
}

bool nvs_sim_image_has(const sim_image *image, const char *name)
{
    const char *found;
    size_t at = 0, length;
    while (nvs_sim_image_next(image, &at, &found, &length))
        if (same(found, length, name))
            return true;
    return image->kind == IMAGE_FATBIN;
}

/* Parameters. */

#define PARAMETER_RECORD 0x1704 /* a parameter, in a record whose length is given */

typedef struct parameter_record {
    uint32_t unused;
    uint16_t index, offset;
    uint32_t bits; /* the size from bit 18 */
} parameter_record;

static bool cubin_parameter(const sim_image *image, const char *name, size_t index, size_t *offset, size_t *bytes)
{
    Elf64_Shdr section;
    const char *text;
    for (size_t i = 0; (text = cubin_section(image, i, &section)) != NULL; i++) {
        if (strncmp(text, ".nv.info.", 9) != 0 || strcmp(text + 9, name) != 0 || section.sh_offset + section.sh_size > image->size)
            continue;
        const char *at = image->bytes + section.sh_offset, *end = at + section.sh_size;
        for (uint16_t head[2]; at + sizeof head <= end; at += sizeof head) {
            memcpy(head, at, sizeof head);
            parameter_record record;
            if (head[0] == PARAMETER_RECORD && at + sizeof head + sizeof record <= end) {
                memcpy(&record, at + sizeof head, sizeof record);
                *offset = record.offset;
                *bytes = record.bits >> 18;
                if (record.index == index)
                    return true;
            }
            if ((head[0] & 0xff) == 4)
                at += head[1];
        }
    }
    return false;
}

/* A parameter is `.param [.align N] .TYPE NAME[COUNT]`; the number in TYPE is its bits. */
static bool ptx_parameter(const sim_image *image, const char *name, size_t index, size_t *offset, size_t *bytes)
{
    const char *found = NULL;
    size_t at = 0, length, place = 0;
    while (ptx_next(image, &at, &found, &length))
        if (same(found, length, name))
            break;
    if (found == NULL || found[strcspn(found, "({;")] != '(')
        return false;
    const char *end = strchr(found, ')');
    for (const char *each = found; end != NULL && (each = strstr(each, ".param")) != NULL && each < end;) {
        each += strlen(".param");
        each += strspn(each, " \t\r\n");
        size_t alignment = 0;
        if (strncmp(each, ".align", 6) == 0) {
            char *rest;
            alignment = strtoul(each + 6, &rest, 10);
            each = rest + strspn(rest, " \t\r\n");
        }
        const size_t element = strtoul(each + strcspn(each, "0123456789"), NULL, 10) / 8;
        const char *array = each + strcspn(each, "[,)");
        *bytes = *array == '[' ? element * strtoul(array + 1, NULL, 10) : element;
        alignment = alignment != 0 ? alignment : element != 0 ? element : 1;
        *offset = (place + alignment - 1) / alignment * alignment;
        place = *offset + *bytes;
        if (index-- == 0)
            return true;
    }
    return false;
}

CUresult nvs_sim_image_parameter(const sim_image *image, const char *function, size_t index, size_t *offset, size_t *bytes)
{
    NVS_SIM_CHECK(image->kind != IMAGE_FATBIN, CUDA_ERROR_NOT_SUPPORTED);
    const bool found = image->kind == IMAGE_PTX ? ptx_parameter(image, function, index, offset, bytes)
                                                : cubin_parameter(image, function, index, offset, bytes);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
