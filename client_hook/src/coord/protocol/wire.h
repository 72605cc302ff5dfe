/* Reads and writes messages by tables of their fields, which wire.gen.h declares.
 *
 * A frame is an array: the type, then the fields.  A field that an older peer does not send has its default; fields beyond the known ones are skipped.
 */
#ifndef NVS_WIRE_H
#define NVS_WIRE_H

#include "base/msgpack.h"

enum { NVS_WIRE_UINT, NVS_WIRE_BOOL, NVS_WIRE_TEXT };

typedef struct nvs_wire_field {
    uint16_t offset, size; /* in the message's struct */
    uint8_t kind;
    uint64_t least, most;  /* of a number; most bytes of a text */
    uint64_t value;        /* the default */
    const char *text;      /* the default of a text */
} nvs_wire_field;

typedef struct nvs_wire_message {
    uint8_t type, required, count; /* fields that every peer sends, and all */
    uint16_t size;
    const nvs_wire_field *fields;
} nvs_wire_message;

#define NVS_WIRE_FIELD(message, name, kind, least, most, value, text)                                              \
    {offsetof(nvs_##message, name), sizeof(((nvs_##message *)0)->name), NVS_WIRE_##kind, (uint64_t)(least), (most), (uint64_t)(value), text}
#define NVS_WIRE_NO_FIELD {0, 0, NVS_WIRE_UINT, 0, 0, 0, NULL}

/* nvs_encode_NAME: bytes written; 0 if the message does not fit, or its text is too long or not UTF-8. */
#define NVS_WIRE_MESSAGE(name, type, required, count)                                                              \
    static const nvs_wire_message nvs_##name##_message = {type, required, count, sizeof(nvs_##name), nvs_##name##_fields}; \
    static inline size_t nvs_encode_##name(const nvs_##name *message, uint8_t *frame, size_t capacity)             \
    {                                                                                                              \
        return nvs_wire_encode(&nvs_##name##_message, message, frame, capacity);                                   \
    }

/* nvs_decode_DIRECTION: reads one frame of any bytes.  `type` is set for NVS_WIRE_OK and NVS_WIRE_UNKNOWN. */
#define NVS_WIRE_DIRECTION(direction, first)                                                                       \
    static inline nvs_wire_result nvs_decode_##direction(const uint8_t *frame, size_t size, nvs_##direction *out)  \
    {                                                                                                              \
        const size_t known = sizeof nvs_##direction##_messages / sizeof nvs_##direction##_messages[0];             \
        return size > NVS_MAX_FRAME_BYTES ? NVS_WIRE_MALFORMED                                                     \
               : nvs_wire_decode(nvs_##direction##_messages, known, frame, size, &out->type, (char *)out + offsetof(nvs_##direction, first)); \
    }

/* An integer of 1, 2, 4 or 8 bytes as the least significant ones of a word. */
static inline uint64_t nvs_wire_load(const void *at, unsigned size)
{
    uint64_t value = 0;
    memcpy(&value, at, size); /* both machines that the hook runs on are little-endian */
    return value;
}

static inline void nvs_wire_store(void *at, unsigned size, uint64_t value)
{
    memcpy(at, &value, size);
}

static inline void nvs_wire_put_field(nvs_wire_out *out, const nvs_wire_field *of, const char *at)
{
    const uint64_t number = of->kind != NVS_WIRE_TEXT ? nvs_wire_load(at, of->size) : 0;
    switch (of->kind) {
    case NVS_WIRE_TEXT: nvs_wire_put_text(out, at, of->most); break;
    case NVS_WIRE_BOOL: nvs_wire_put(out, number != 0 ? 0xc3 : 0xc2, 0, 0); break;
    default: nvs_wire_put_uint(out, number < of->most ? number : of->most); break; /* the peer refuses more */
    }
}

static inline size_t nvs_wire_encode(const nvs_wire_message *of, const void *message, uint8_t *frame, size_t capacity)
{
    nvs_wire_out out = {frame, frame + capacity, false};
    const bool is_short = of->count < 15; /* a fixarray, else an array16 */
    nvs_wire_put(&out, is_short ? 0x91 + of->count : 0xdc, of->count + 1u, is_short ? 0 : 2);
    nvs_wire_put_uint(&out, of->type);
    for (unsigned i = 0; i < of->count; i++)
        nvs_wire_put_field(&out, &of->fields[i], (const char *)message + of->fields[i].offset);
    return out.failed ? 0 : (size_t)(out.at - frame);
}

static inline bool nvs_wire_get_field(nvs_wire_in *in, const nvs_wire_field *of, char *at)
{
    uint64_t number = 0;
    bool flag = false;
    switch (of->kind) {
    case NVS_WIRE_TEXT: return nvs_wire_get_text(in, at, of->most);
    case NVS_WIRE_BOOL:
        if (!nvs_wire_get_bool(in, &flag))
            return false;
        number = flag;
        break;
    default:
        if (!nvs_wire_get_uint(in, of->most, &number) || number < of->least)
            return false;
    }
    nvs_wire_store(at, of->size, number);
    return true;
}

/* `present`: fields in the frame. */
static inline bool nvs_wire_read(nvs_wire_in *in, const nvs_wire_message *of, uint64_t present, void *message)
{
    memset(message, 0, of->size);
    if (present < of->required)
        return false;
    for (unsigned i = 0; i < of->count; i++) {
        const nvs_wire_field *field = &of->fields[i];
        char *at = (char *)message + field->offset;
        if (i < present && !nvs_wire_get_field(in, field, at))
            return false;
        if (i >= present && field->kind == NVS_WIRE_TEXT)
            memcpy(at, field->text, strlen(field->text) + 1);
        else if (i >= present)
            nvs_wire_store(at, field->size, field->value);
    }
    return nvs_wire_skip(in, present > of->count ? present - of->count : 0);
}

static inline nvs_wire_result nvs_wire_decode(const nvs_wire_message *const *known, size_t count, const uint8_t *frame, size_t size,
                                              uint8_t *type, void *message)
{
    nvs_wire_in in = {frame, frame + size};
    uint64_t present, number;
    if (!nvs_wire_get_array(&in, &present) || present == 0 || !nvs_wire_get_uint(&in, UINT8_MAX, &number))
        return NVS_WIRE_MALFORMED;
    *type = (uint8_t)number;
    size_t i = 0;
    while (i < count && known[i]->type != number)
        i++;
    const bool good = i < count ? nvs_wire_read(&in, known[i], present - 1, message) : nvs_wire_skip(&in, present - 1);
    if (!good || in.at != in.end)
        return NVS_WIRE_MALFORMED;
    return i < count ? NVS_WIRE_OK : NVS_WIRE_UNKNOWN;
}

#endif
