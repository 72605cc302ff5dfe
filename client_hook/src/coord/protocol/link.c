/* See link.h.
 *
 * While nobody listens it tries again after 10 ms, doubled up to 50 ms while a coordinator may be restarting and up to 500 ms
 * later, and sleeps meanwhile.  After the loss of a connection it connects again after the same delay.  Nothing that was queued on the old connection
 * reaches the new peer.
 */
#define _GNU_SOURCE /* program_invocation_short_name */
#include "coord/protocol/link.h"

#include "base/base.h"
#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "coord/protocol/transport.h"

#include <errno.h>
#include <unistd.h>

#define FIRST_RETRY_NS 10000000u
#define RESTART_RETRY_NS 50000000u   /* the longest delay while a restart may be under way: an attempt takes microseconds */
#define RESTART_NS 10000000000u
#define LONGEST_RETRY_NS 500000000u
#define STABLE_NS 1000000000u        /* after a connection that lasted so long the retries begin anew */
#define REFUSED_RETRY_NS 5000000000u /* after the coordinator refused us for good */
enum { FRAMES_A_ROUND = 64 };

static bool open_socket, up, broken, refused, has_more;
static uint64_t up_since_ns, lost_ns, retry_at_ns, retry_delay_ns;

void nvs_link_start(void)
{
    open_socket = up = broken = refused = has_more = false;
    retry_at_ns = 0;
    retry_delay_ns = FIRST_RETRY_NS;
    lost_ns = nvs_now_ns();
}

bool nvs_link_up(void)
{
    return up;
}

void nvs_link_send(const uint8_t *frame, size_t size)
{
    if (!up || broken || size == 0)
        return;
    if (!nvs_transport_send(frame, size))
        broken = true; /* the peer reads nothing; all state is sent again on the next connection */
}

void nvs_link_fail(void)
{
    broken = true;
}

void nvs_link_refused(void)
{
    broken = refused = true;
}

uint64_t nvs_link_due(void)
{
    return open_socket ? UINT64_MAX : retry_at_ns;
}

bool nvs_link_has_more(void)
{
    return has_more || broken;
}

int nvs_link_descriptor(short *events)
{
    return open_socket ? nvs_transport_descriptor(events) : -1;
}

_Static_assert((int)NVS_MODE_MANAGED == NVS_MEMORY_MODE_MANAGED && (int)NVS_MODE_SWAP == NVS_MEMORY_MODE_SWAP, "base/config.h");
_Static_assert(NVS_MAX_WEIGHT == NVS_WIRE_MAX_WEIGHT, "base/config.h");

static void say_hello(void)
{
    nvs_hello hello = {
        .protocol = NVS_PROTOCOL_VERSION,
        .process_id = (uint32_t)getpid(),
        .priority = nvs_config.priority,
        .weight = nvs_config.weight,
        .memory_mode = nvs_config.memory_mode,
        .memory_limit_bytes = nvs_config.memory_limit,
        .library_version = NVS_VERSION,
    };
    uint8_t frame[NVS_MAX_FRAME_BYTES];
    const char *program = program_invocation_short_name;
    size_t length = strnlen(program, sizeof hello.program - 1);
    memcpy(hello.name, nvs_config.name, sizeof hello.name);
    memcpy(hello.gang, nvs_config.gang, sizeof hello.gang);
    memcpy(hello.program, program, length);
    if (!nvs_wire_text_valid((const uint8_t *)hello.program, length))
        memset(hello.program, 0, sizeof hello.program); /* it is only shown */
    nvs_link_send(frame, nvs_encode_hello(&hello, frame, sizeof frame));
}

/* Only if a value is set: an older coordinator does not know the message. */
static void say_profile(void)
{
    const struct nvs_profile_settings *our = &nvs_config.profile;
    if (our->job_class != 0 || our->share_request != 0 || our->share_limit != 1000 || our->deadline_ns != 0 || our->spatial)
        NVS_LINK_SEND(profile, our->job_class, our->share_request, our->share_limit, our->deadline_ns, our->spatial);
}

static void drop(const nvs_link_handlers *handlers)
{
    uint64_t now = nvs_now_ns();
    bool was_up = up;
    if (up && now - up_since_ns > STABLE_NS)
        retry_delay_ns = FIRST_RETRY_NS;
    if (was_up)
        lost_ns = now;
    const uint64_t longest = now - lost_ns < RESTART_NS ? RESTART_RETRY_NS : LONGEST_RETRY_NS;
    retry_at_ns = now + (refused ? REFUSED_RETRY_NS : retry_delay_ns);
    retry_delay_ns = retry_delay_ns * 2 < longest ? retry_delay_ns * 2 : longest;
    nvs_transport_close();
    open_socket = up = broken = refused = has_more = false; /* nothing to receive before the next connection */
    if (was_up) {
        nvs_log(NVS_LOG_INFO, "connection to %s lost", nvs_config.socket);
        handlers->lost();
    }
}

void nvs_link_serve(const nvs_link_handlers *handlers)
{
    static uint8_t frame[NVS_MAX_FRAME_BYTES + 1];
    size_t size = 0;
    if (!open_socket && nvs_now_ns() >= retry_at_ns) {
        open_socket = nvs_transport_connect(nvs_config.socket, nvs_config.coordinator_user) == NVS_OK;
        if (!open_socket)
            retry_at_ns = nvs_now_ns() + REFUSED_RETRY_NS;
    }
    if (open_socket && !nvs_transport_own())
        broken = true;
    for (unsigned i = 0; i < FRAMES_A_ROUND && open_socket && !broken; i++) {
        nvs_transport_event event = nvs_transport_next(frame, sizeof frame, &size);
        has_more = event != NVS_TRANSPORT_NOTHING; /* there may be more than one round takes */
        if (!has_more)
            return;
        if (event == NVS_TRANSPORT_FRAME) {
            handlers->frame(frame, size);
        } else if (event == NVS_TRANSPORT_LOST) {
            broken = true;
        } else if (!up) {
            up = true;
            up_since_ns = nvs_now_ns();
            say_hello();
            say_profile();
            handlers->connected();
        }
    }
    if (broken)
        drop(handlers);
}
