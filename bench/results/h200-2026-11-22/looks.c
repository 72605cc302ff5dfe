/* What a look of pacing (client_hook/src/gate/pacing/pacing.c) asks the driver, and what each question takes: looks.txt.
 *
 *     cc -O2 -I ../.. -o looks looks.c -ldl && taskset -c 3 ./looks
 *
 * A loop of empty launches, waited for now and then, with a look every so often; in cycles of the time stamp counter.  The last
 * runs read 4 MiB after each launch, so that the driver is found in no cache.
 */
#define _GNU_SOURCE
#include "driver_program.h"

#include <stdbool.h>
#include <string.h>
#include <x86intrin.h>

enum { ASKED = 16, LAUNCHES_AT_ONCE = 50, WAITED_FOR = 1000, TRASH = 4 << 20, NO_TIMING = 2, RELAXED = 2 };
enum { NOTHING, ALL, UNTIMED, STREAM, QUERY, EXCHANGE, RECORD, VARIANTS };

static const char kernel[] = ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nop()\n{\n ret;\n}\n";

static int (*event_create)(void **, unsigned), (*event_record)(void *, void *), (*event_query)(void *);
static int (*event_elapsed)(float *, void *, void *), (*stream_query)(void *), (*stream_capturing)(void *, int *);
static int (*exchange_mode)(int *), (*current_context)(void **);
static void *function, *timed[2], *untimed[2];
static char *trash;
static bool cold;
static volatile long sum_of_trash;
static struct {
    const char *what;
    uint64_t cycles;
} asked[ASKED];

#define TAKEN(place, text, call)                     \
    do {                                             \
        const uint64_t begin_ = __rdtsc();           \
        call;                                        \
        asked[place].cycles += __rdtsc() - begin_;   \
        asked[place].what = text;                    \
    } while (0)

static void launch(void)
{
    check(cu_launch(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
    long sum = 0;
    for (long i = 0; cold && i < TRASH; i += 64)
        sum += trash[i];
    sum_of_trash = sum;
}

static void look(int variant)
{
    static unsigned which;
    int mode = RELAXED, capturing;
    float milliseconds;
    void *context;
    which ^= 1;
    if (variant == ALL)
        TAKEN(0, "clock", now_ns());
    if (variant == ALL)
        TAKEN(1, "get_current", current_context(&context));
    if (variant == ALL || variant == EXCHANGE)
        TAKEN(2, "exchange", exchange_mode(&mode));
    if (variant == ALL)
        TAKEN(3, "is_capturing", stream_capturing(stream, &capturing));
    if (variant == ALL)
        TAKEN(4, "query", event_query(timed[which]));
    if (variant == ALL)
        TAKEN(5, "elapsed", event_elapsed(&milliseconds, timed[which ^ 1], timed[which]));
    if (variant == UNTIMED || variant == QUERY)
        TAKEN(6, "query untimed", event_query(untimed[which]));
    if (variant == STREAM)
        TAKEN(7, "stream query", stream_query(stream));
    if (variant == ALL || variant == RECORD)
        TAKEN(8, "record timed", event_record(timed[which ^ 1], stream));
    if (variant == UNTIMED)
        TAKEN(9, "record untimed", event_record(untimed[which ^ 1], stream));
    if (variant == ALL || variant == EXCHANGE)
        TAKEN(10, "exchange back", exchange_mode(&mode));
    TAKEN(11, "next launch", launch());
    TAKEN(12, "second launch", launch());
    TAKEN(13, "third launch", launch());
}

static void phase(int variant, double seconds, double gap_ms)
{
    uint64_t launches = 0, looks = 0, now;
    memset(asked, 0, sizeof asked);
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
    const uint64_t begin = now_ns();
    for (uint64_t last = begin; (double)((now = now_ns()) - begin) < seconds * 1e9;) {
        for (int i = 0; i < LAUNCHES_AT_ONCE; i++)
            launch();
        launches += LAUNCHES_AT_ONCE;
        if (launches % WAITED_FOR == 0)
            check(cu_stream_synchronize(stream), "cuStreamSynchronize");
        if (variant == NOTHING || (double)(now - last) < gap_ms * 1e6)
            continue;
        last = now;
        looks++;
        look(variant);
    }
    check(cu_stream_synchronize(stream), "cuStreamSynchronize");
    printf("variant %d cold %d gap %.1f ms: %.1f ns a launch, %lu looks:", variant, cold, gap_ms,
           (double)(now - begin) / (double)(launches + 3 * looks), (unsigned long)looks);
    for (int i = 0; i < ASKED; i++)
        if (asked[i].what != NULL)
            printf(" %s %.0f", asked[i].what, (double)asked[i].cycles / (double)looks);
    printf(" cycles\n");
}

int main(void)
{
    open_driver(kernel);
    function = kernel_of_module("nop");
    trash = calloc(1, TRASH);
    *(void **)&event_create = symbol(library, "cuEventCreate");
    *(void **)&event_record = symbol(library, "cuEventRecord");
    *(void **)&event_query = symbol(library, "cuEventQuery");
    *(void **)&event_elapsed = symbol(library, "cuEventElapsedTime");
    *(void **)&stream_query = symbol(library, "cuStreamQuery");
    *(void **)&stream_capturing = symbol(library, "cuStreamIsCapturing");
    *(void **)&exchange_mode = symbol(library, "cuThreadExchangeStreamCaptureMode");
    *(void **)&current_context = symbol(library, "cuCtxGetCurrent");
    for (int i = 0; i < 2; i++) {
        check(event_create(&timed[i], 0), "cuEventCreate");
        check(event_create(&untimed[i], NO_TIMING), "cuEventCreate");
        check(event_record(timed[i], stream), "cuEventRecord");
        check(event_record(untimed[i], stream), "cuEventRecord");
    }
    for (int round = 0; round < 2; round++)
        for (int variant = NOTHING; variant < VARIANTS; variant++)
            phase(variant, 0.5, 1.0);
    cold = true;
    for (int variant = NOTHING; variant < VARIANTS; variant++)
        phase(variant, 0.5, 4.0);
    return 0;
}
