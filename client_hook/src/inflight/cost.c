/* See cost.h.
 *
 * Stretches are measured long after their estimate, and many are pending at once.  Each is compared with its present estimate: otherwise each
 * pending stretch would correct the same error again.
 */
#include "inflight/cost.h"

#define LEAST_NS 500u        /* the shortest kernels take longer */
#define MOST_NS 4000000000u
#define MOST_AT_ONCE 16.0    /* largest correction factor: one measurement may be an outlier */

static uint32_t clamp(double ns)
{
    return ns < LEAST_NS ? LEAST_NS : ns > MOST_NS ? MOST_NS : (uint32_t)ns;
}

/* Takes one kind out of the set; NVS_PACE_KINDS: it is empty. */
static unsigned take(nvs_pace_set *kinds)
{
    for (unsigned word = 0; word < NVS_PACE_SET_WORDS; word++) {
        const uint64_t bits = kinds->bits[word];
        kinds->bits[word] = bits & (bits - 1);
        if (bits != 0)
            return 64 * word + (unsigned)__builtin_ctzll(bits);
    }
    return NVS_PACE_KINDS;
}

uint64_t nvs_pace_basis(const nvs_pace_costs *costs, const nvs_pace_set *kinds)
{
    nvs_pace_set left = *kinds;
    uint64_t sum = 0;
    for (unsigned kind; (kind = take(&left)) < NVS_PACE_KINDS;)
        sum += costs->ns[kind];
    return sum;
}

/* How many kinds have no estimate. */
static unsigned unknown(const nvs_pace_costs *costs, const nvs_pace_set *kinds)
{
    nvs_pace_set left = *kinds;
    unsigned count = 0;
    for (unsigned kind; (kind = take(&left)) < NVS_PACE_KINDS;)
        count += costs->ns[kind] == 0;
    return count;
}

void nvs_pace_learn(nvs_pace_costs *costs, const nvs_pace_stretch *stretch, uint64_t took_ns, bool exact)
{
    const unsigned fresh = unknown(costs, &stretch->kinds);
    const uint64_t basis_ns = nvs_pace_basis(costs, &stretch->kinds);
    const double change = stretch->basis_ns == 0 ? 1.0 : (double)basis_ns / (double)stretch->basis_ns;
    const double known_ns = (double)(stretch->ns - stretch->guess_ns) * change;
    const double estimated_ns = known_ns + (double)stretch->guess_ns;
    double ratio = estimated_ns == 0 ? 1.0 : (double)took_ns / estimated_ns;
    ratio = ratio > MOST_AT_ONCE ? MOST_AT_ONCE : ratio < 1.0 / MOST_AT_ONCE ? 1.0 / MOST_AT_ONCE : ratio;
    if (!exact && ratio >= 1.0 && fresh == 0)
        return; /* an upper bound above the estimate tells nothing */
    nvs_pace_set left = stretch->kinds;
    for (unsigned kind; (kind = take(&left)) < NVS_PACE_KINDS;) {
        uint32_t *ns = &costs->ns[kind];
        if (*ns == 0) /* a new kind comes last in a stretch, and once */
            *ns = clamp(((double)took_ns - known_ns) / fresh);
        else if (fresh == 0)
            *ns = clamp(*ns * (exact ? (3.0 + ratio) / 4.0 : ratio));
    }
}
