/* The subset of msgpack that messages use: writers into a bounded buffer, readers of untrusted bytes.  coord/protocol/wire.h uses it.
 *
 * Readers accept every encoding of a value that fits, read nothing outside the frame, allocate nothing and do not recurse;
 * they accept exactly what decode() in coordinator/protocol/messages.py does.
 *
 * Non-goals: messages.
 */
#ifndef NVS_MSGPACK_H
#define NVS_MSGPACK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum nvs_wire_result {
    NVS_WIRE_OK = 0,
    NVS_WIRE_UNKNOWN,   /* well-formed, but of an unknown type */
    NVS_WIRE_MALFORMED, /* the protocol forbids it */
} nvs_wire_result;

/* --- writing: a value that does not fit or is invalid sets `failed`, which stops all writing --- */

typedef struct nvs_wire_out {
    uint8_t *at, *end;
    bool failed;
} nvs_wire_out;

static inline void nvs_wire_put(nvs_wire_out *out, unsigned head, uint64_t value, unsigned bytes)
{
    if (out->failed || (size_t)(out->end - out->at) < 1u + bytes) {
        out->failed = true;
        return;
    }
    *out->at++ = (uint8_t)head;
    while (bytes-- > 0)
        *out->at++ = (uint8_t)(value >> (8 * bytes));
}

static inline void nvs_wire_put_uint(nvs_wire_out *out, uint64_t value)
{
    if (value < 0x80)
        nvs_wire_put(out, (unsigned)value, 0, 0);
    else if (value <= UINT8_MAX)
        nvs_wire_put(out, 0xcc, value, 1);
    else if (value <= UINT16_MAX)
        nvs_wire_put(out, 0xcd, value, 2);
    else if (value <= UINT32_MAX)
        nvs_wire_put(out, 0xce, value, 4);
    else
        nvs_wire_put(out, 0xcf, value, 8);
}

/* Valid UTF-8 by RFC 3629: no overlong forms, no surrogates, nothing above U+10FFFF; no zero byte. */
static inline bool nvs_wire_text_valid(const uint8_t *text, size_t size)
{
    size_t i = 0;
    while (i < size) {
        uint8_t lead = text[i++];
        uint8_t low = 0x80, high = 0xbf;
        unsigned more;
        if (lead == 0)
            return false;
        if (lead < 0x80)
            continue;
        if (lead >= 0xc2 && lead <= 0xdf) {
            more = 1;
        } else if (lead >= 0xe0 && lead <= 0xef) {
            more = 2;
            low = lead == 0xe0 ? 0xa0 : 0x80;
            high = lead == 0xed ? 0x9f : 0xbf;
        } else if (lead >= 0xf0 && lead <= 0xf4) {
            more = 3;
            low = lead == 0xf0 ? 0x90 : 0x80;
            high = lead == 0xf4 ? 0x8f : 0xbf;
        } else {
            return false;
        }
        for (; more > 0; more--, low = 0x80, high = 0xbf) {
            if (i >= size || text[i] < low || text[i] > high)
                return false;
            i++;
        }
    }
    return true;
}

static inline void nvs_wire_put_text(nvs_wire_out *out, const char *text, size_t limit)
{
    size_t size = 0;
    while (size <= limit && text[size] != 0)
        size++;
    if (size > limit || !nvs_wire_text_valid((const uint8_t *)text, size)) {
        out->failed = true;
        return;
    }
    if (size < 32)
        nvs_wire_put(out, 0xa0u | (unsigned)size, 0, 0);
    else
        nvs_wire_put(out, size <= UINT8_MAX ? 0xd9 : 0xda, size, size <= UINT8_MAX ? 1 : 2);
    if (out->failed || (size_t)(out->end - out->at) < size) {
        out->failed = true;
        return;
    }
    memcpy(out->at, text, size);
    out->at += size;
}

/* --- reading: false for malformed input --- */

typedef struct nvs_wire_in {
    const uint8_t *at, *end;
} nvs_wire_in;

static inline bool nvs_wire_take(nvs_wire_in *in, unsigned bytes, uint64_t *value)
{
    if ((size_t)(in->end - in->at) < bytes)
        return false;
    for (*value = 0; bytes > 0; bytes--)
        *value = *value << 8 | *in->at++;
    return true;
}

/* No field is negative. */
static inline bool nvs_wire_get_uint(nvs_wire_in *in, uint64_t highest, uint64_t *value)
{
    uint64_t head;
    if (!nvs_wire_take(in, 1, &head))
        return false;
    *value = head;
    if (head >= 0x80) {
        const bool is_signed = head >= 0xd0;
        const unsigned bytes = 1u << (head & 3);
        if (head < 0xcc || head > 0xd3 || !nvs_wire_take(in, bytes, value) || (is_signed && *value >> (8 * bytes - 1) != 0))
            return false;
    }
    return *value <= highest;
}

static inline bool nvs_wire_get_bool(nvs_wire_in *in, bool *value)
{
    uint64_t head;
    if (!nvs_wire_take(in, 1, &head) || (head != 0xc2 && head != 0xc3))
        return false;
    *value = head == 0xc3;
    return true;
}

static inline bool nvs_wire_get_text(nvs_wire_in *in, char *text, size_t limit)
{
    uint64_t head, size;
    if (!nvs_wire_take(in, 1, &head))
        return false;
    if (head >= 0xa0 && head <= 0xbf)
        size = head & 0x1f;
    else if (head >= 0xd9 && head <= 0xdb) { /* str */
        if (!nvs_wire_take(in, 1u << (head - 0xd9), &size))
            return false;
    } else if (head >= 0xc4 && head <= 0xc6) { /* bin */
        if (!nvs_wire_take(in, 1u << (head - 0xc4), &size))
            return false;
    } else {
        return false;
    }
    if (size > limit || size > (size_t)(in->end - in->at) || !nvs_wire_text_valid(in->at, (size_t)size))
        return false;
    memcpy(text, in->at, (size_t)size);
    text[size] = 0;
    in->at += size;
    return true;
}

static inline bool nvs_wire_get_array(nvs_wire_in *in, uint64_t *count)
{
    uint64_t head;
    if (!nvs_wire_take(in, 1, &head))
        return false;
    if (head >= 0x90 && head <= 0x9f) {
        *count = head & 0x0f;
        return true;
    }
    if (head != 0xdc && head != 0xdd)
        return false;
    return nvs_wire_take(in, head == 0xdc ? 2 : 4, count);
}

/* A timestamp has three forms, and less than a second of nanoseconds. */
static inline bool nvs_wire_timestamp_valid(const nvs_wire_in *in, uint64_t size)
{
    nvs_wire_in look = *in;
    uint64_t nanoseconds = 0;
    if (size == 4)
        return true;
    if (size == 8)
        return nvs_wire_take(&look, 8, &nanoseconds) && nanoseconds >> 34 < 1000000000;
    return size == 12 && nvs_wire_take(&look, 4, &nanoseconds) && nanoseconds < 1000000000;
}

/* Skips `values` values of any type.  Nesting adds to the count, so no stack is needed; each value takes at least one
 * byte, so a count beyond what is left is refused at once and the sum cannot overflow. */
static inline bool nvs_wire_skip(nvs_wire_in *in, uint64_t values)
{
    while (values > 0) {
        uint64_t head, size = 0;
        if (values > (uint64_t)(in->end - in->at))
            return false;
        values--;
        if (!nvs_wire_take(in, 1, &head))
            return false;
        if (head < 0x80 || head >= 0xe0 || head == 0xc0 || head == 0xc2 || head == 0xc3)
            continue;
        if (head <= 0x8f) {
            values += 2 * (head & 0x0f);
        } else if (head <= 0x9f) {
            values += head & 0x0f;
        } else if (head <= 0xbf) {
            size = head & 0x1f;
        } else if (head == 0xc1) {
            return false;
        } else if (head <= 0xc6) { /* bin */
            if (!nvs_wire_take(in, 1u << (head - 0xc4), &size))
                return false;
        } else if (head <= 0xc9 || (head >= 0xd4 && head <= 0xd8)) { /* ext, fixext */
            uint64_t code;
            if (head <= 0xc9) {
                if (!nvs_wire_take(in, 1u << (head - 0xc7), &size))
                    return false;
            } else {
                size = (uint64_t)1 << (head - 0xd4);
            }
            if (!nvs_wire_take(in, 1, &code) || (code == 0xff && !nvs_wire_timestamp_valid(in, size)))
                return false;
        } else if (head <= 0xcb) {
            size = head == 0xca ? 4 : 8;
        } else if (head <= 0xd3) {
            size = (uint64_t)1 << ((head - 0xcc) & 3);
        } else if (head <= 0xdb) { /* str */
            if (!nvs_wire_take(in, 1u << (head - 0xd9), &size))
                return false;
        } else {
            uint64_t count;
            if (!nvs_wire_take(in, head & 1 ? 4 : 2, &count))
                return false;
            values += head >= 0xde ? 2 * count : count;
        }
        if (size > (uint64_t)(in->end - in->at))
            return false;
        in->at += size;
    }
    return true;
}

#endif
