/* The part of the time that a program may keep a GPU busy, as a duty cycle of its gate: no clock, no gate, no CUDA.
 *
 * Credit grows by `rate` thousandths of the time, and time from the opening of the gate to the end of the drain is taken from it.  The gate stays
 * closed until no debt is left, so that a drain that lasts too long delays the next cycle.
 *  - The gate is open for one burst at a time.  Credit never exceeds a burst, so idle time earns one cycle at most.
 *  - An open phase without a call takes nothing: the GPU was drained before it.
 *  - A debt survives a gate that is opened early.  It ends with the lease.
 *
 * Non-goals: leases; anything that reads a clock or acts (lease.c).
 */
#ifndef NVS_DUTY_H
#define NVS_DUTY_H

#include <stdbool.h>
#include <stdint.h>

enum { NVS_DUTY_ALWAYS = 1000 }; /* the rate without a limit */

typedef enum nvs_duty_phase {
    NVS_DUTY_OFF = 0, /* no limit, or no lease */
    NVS_DUTY_OPEN,
    NVS_DUTY_CLOSING, /* the gate is closed, or closes, and submitted work runs */
    NVS_DUTY_CLOSED,
} nvs_duty_phase;

typedef struct nvs_duty {
    nvs_duty_phase phase;
    uint16_t rate;     /* thousandths, 1 to NVS_DUTY_ALWAYS */
    int64_t credit_ns; /* negative: debt */
    uint64_t at_ns;    /* credit is counted up to here */
    uint64_t until_ns; /* end of the phase; while CLOSING: the next look at the drain */
    uint64_t calls;    /* gated calls ever, at the end of the last drain; UINT64_MAX: not known */
} nvs_duty;

void nvs_duty_init(nvs_duty *duty);
void nvs_duty_set_rate(nvs_duty *duty, uint32_t rate, uint64_t now_ns);
void nvs_duty_stop(nvs_duty *duty);                    /* the lease ends, or the limit */
void nvs_duty_opened(nvs_duty *duty, uint64_t now_ns); /* the gate opens under a lease, for whatever reason */

/* At the end of an open phase.  False: no call has come, and the gate stays open. */
bool nvs_duty_begin_close(nvs_duty *duty, uint64_t now_ns, uint64_t calls, bool inside);

/* The drain has not ended.  False: it has lasted so long that work may wait for a call before the gate, which has to open. */
bool nvs_duty_wait_on(nvs_duty *duty, uint64_t now_ns);
void nvs_duty_drained(nvs_duty *duty, uint64_t now_ns, uint64_t calls);

#endif
