/* ZeroMQ's wire protocol as the hook speaks it: any bytes of a coordinator, in pieces of any size.
 *
 * The first byte says how large a piece is.  No frame is given out before both sides have shaken hands, and none larger than the bound.
 */
#define _GNU_SOURCE /* as the hook */
#include "fuzz.h"

#include "coord/protocol/link.c" /* the hook's: its state is static */

nvs_settings nvs_config;

bool nvs_config_remote_peer(char *out, size_t size)
{
    (void)out, (void)size;
    return false;
}

uint64_t nvs_now_ns(void)
{
    return 0;
}

bool nvs_memory_mode_chosen(void)
{
    return true;
}

void nvs_log(int level, const char *format, ...)
{
    (void)level, (void)format;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static uint8_t frame[LARGEST];
    int ends[2];
    size_t piece = size > 0 ? 1 + (size_t)data[0] * 16 : 1, length;
    MUST(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends) == 0);
    atomic_store(&connection, ends[0]);
    connected_file = nvs_descriptor_file(ends[0]);
    greeting_read = peer_ready = lost = false;
    in_begin = in_end = out_begin = out_end = 0;
    for (size_t at = 1; at < size && !lost; at += piece) {
        const size_t part = piece < size - at ? piece : size - at;
        MUST(send(ends[1], data + at, part, MSG_DONTWAIT) == (ssize_t)part);
        nvs_transport_event event;
        while ((event = transport_next(frame, sizeof frame, &length)) != NVS_TRANSPORT_NOTHING && event != NVS_TRANSPORT_LOST) {
            MUST(event != NVS_TRANSPORT_FRAME || (greeting_read && peer_ready && length <= LARGEST));
        }
        uint8_t sink[4096];
        while (recv(ends[1], sink, sizeof sink, MSG_DONTWAIT) > 0) {
        }
    }
    MUST(!peer_ready || greeting_read);
    transport_close();
    close(ends[1]);
    return 0;
}
