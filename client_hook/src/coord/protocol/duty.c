/* See duty.h. */
#include "coord/protocol/duty.h"

#define PERIOD_NS INT64_C(30000000)
#define SHORTEST_OPEN_NS INT64_C(1000000)     /* a lower rate makes the period longer */
#define LONGEST_CLOSED_NS INT64_C(10000000000) /* after one very long kernel */
#define LONGEST_DRAIN_NS UINT64_C(1000000000)
#define LONGEST_NAP_NS UINT64_C(5000000)

static int64_t burst_ns(const nvs_duty *duty)
{
    const int64_t part = PERIOD_NS * duty->rate / NVS_DUTY_ALWAYS;
    return part > SHORTEST_OPEN_NS ? part : SHORTEST_OPEN_NS;
}

static void count(nvs_duty *duty, uint64_t now_ns, bool used)
{
    const int64_t elapsed = (int64_t)(now_ns - duty->at_ns);
    duty->credit_ns += elapsed / NVS_DUTY_ALWAYS * duty->rate + elapsed % NVS_DUTY_ALWAYS * duty->rate / NVS_DUTY_ALWAYS;
    if (used)
        duty->credit_ns -= elapsed;
    if (duty->credit_ns > burst_ns(duty))
        duty->credit_ns = burst_ns(duty);
    duty->at_ns = now_ns;
}

static bool uses(const nvs_duty *duty)
{
    return duty->phase == NVS_DUTY_OPEN || duty->phase == NVS_DUTY_CLOSING;
}

static uint64_t without_debt_ns(const nvs_duty *duty, uint64_t now_ns)
{
    if (duty->credit_ns >= 0)
        return now_ns;
    const int64_t most = LONGEST_CLOSED_NS * duty->rate / NVS_DUTY_ALWAYS;
    const int64_t debt = -duty->credit_ns < most ? -duty->credit_ns : most;
    return now_ns + (uint64_t)((debt * NVS_DUTY_ALWAYS + duty->rate - 1) / duty->rate);
}

void nvs_duty_init(nvs_duty *duty)
{
    duty->rate = NVS_DUTY_ALWAYS;
    nvs_duty_stop(duty);
}

void nvs_duty_stop(nvs_duty *duty)
{
    *duty = (nvs_duty){.rate = duty->rate, .calls = UINT64_MAX};
}

void nvs_duty_set_rate(nvs_duty *duty, uint32_t rate, uint64_t now_ns)
{
    if (duty->phase != NVS_DUTY_OFF)
        count(duty, now_ns, uses(duty));
    duty->rate = (uint16_t)(rate == 0 ? 1 : rate < NVS_DUTY_ALWAYS ? rate : NVS_DUTY_ALWAYS); /* never without an end */
    if (duty->rate == NVS_DUTY_ALWAYS)
        nvs_duty_stop(duty);
    else if (duty->phase == NVS_DUTY_OPEN && duty->until_ns > now_ns + (uint64_t)burst_ns(duty))
        duty->until_ns = now_ns + (uint64_t)burst_ns(duty);
    else if (duty->phase == NVS_DUTY_CLOSED)
        duty->until_ns = without_debt_ns(duty, now_ns);
}

void nvs_duty_opened(nvs_duty *duty, uint64_t now_ns)
{
    if (duty->rate == NVS_DUTY_ALWAYS)
        return;
    if (duty->phase == NVS_DUTY_OFF)
        duty->at_ns = now_ns;
    count(duty, now_ns, uses(duty));
    duty->phase = NVS_DUTY_OPEN;
    duty->until_ns = now_ns + (uint64_t)burst_ns(duty);
}

bool nvs_duty_begin_close(nvs_duty *duty, uint64_t now_ns, uint64_t calls, bool inside)
{
    const bool idle = calls == duty->calls && !inside;
    count(duty, now_ns, !idle);
    if (idle)
        duty->until_ns = now_ns + (uint64_t)burst_ns(duty);
    else
        duty->phase = NVS_DUTY_CLOSING;
    return !idle;
}

bool nvs_duty_wait_on(nvs_duty *duty, uint64_t now_ns)
{
    const uint64_t lasted = now_ns - duty->at_ns; /* credit was counted when the close began */
    const uint64_t nap = lasted / 16; /* few looks at a long kernel */
    duty->until_ns = now_ns + (nap < LONGEST_NAP_NS ? nap : LONGEST_NAP_NS);
    return lasted < LONGEST_DRAIN_NS;
}

void nvs_duty_drained(nvs_duty *duty, uint64_t now_ns, uint64_t calls)
{
    count(duty, now_ns, true);
    duty->phase = NVS_DUTY_CLOSED;
    duty->calls = calls;
    duty->until_ns = without_debt_ns(duty, now_ns);
}
