/* See verify.h.
 *
 * A ring holds one word for each of the 4 M newest calls, by correlation id.  The calling thread writes the word; it is read when the work has
 * ended.  Work of an older call counts as unseen.  Queries and waits are not stored, as polling would displace all other calls.
 */
#include "detector.h"

#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { RING = 1 << 22, MOST_NAMES = 1024, NAME_CELLS = 4096 };

/* The class of a call.  Of several calls with one correlation id the highest class counts. */
enum { UNSEEN, OTHER, HOOK, GATED, ESCAPED };

typedef struct named {
    const char *name;
    uint16_t what; /* OTHER or ESCAPED; UNSEEN: a query or a wait */
} named;

static _Atomic uint64_t ring[RING]; /* correlation << 32 | what << 16 | name */
static named names[MOST_NAMES] = {{"(a call that was not seen)", ESCAPED}};
static unsigned name_count = 1;
static _Atomic(const char *) cell_name[NAME_CELLS]; /* by the address of the name, which CUPTI keeps */
static uint16_t cell_index[NAME_CELLS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static nvs_tally tally;
static _Atomic uint64_t gated_calls; /* relaxed: a count */

static const char *const gated_names[] = { /* sorted, as the table is */
#define NVS_STREAM(symbol, since, parameters, arguments, stream) #symbol,
#define NVS_CURRENT(symbol, since, parameters, arguments) #symbol,
#define NVS_CUSTOM(symbol, since)
#define NVS_PASS(symbol, since, reason)
#define NVS_THUNK(symbol, since, reason) #symbol,
#define NVS_FOREIGN(symbol, since, reason)
#include "driver/cuda_api.def"
};

static const char *const other_names[] = {
#define NVS_STREAM(symbol, since, parameters, arguments, stream)
#define NVS_CURRENT(symbol, since, parameters, arguments)
#define NVS_CUSTOM(symbol, since) #symbol,
#define NVS_PASS(symbol, since, reason) #symbol,
#define NVS_THUNK(symbol, since, reason)
#define NVS_FOREIGN(symbol, since, reason) #symbol,
#include "driver/cuda_api.def"
};

static int by_name(const void *wanted, const void *entry)
{
    return strcmp(wanted, *(const char *const *)entry);
}

static bool listed(const char *name, const char *const *list, size_t count)
{
    return bsearch(name, list, count, sizeof *list, by_name) != NULL;
}

/* The class of a call outside of the gate.  A function that is in no table is classified by the words in its name. */
static uint16_t classify(const char *name)
{
    static const char *const work[] = {"Launch", "Memcpy", "Memset", "Prefetch"};
    static const char *const quiet[] = {"Query", "Get", "Synchronize", "EventRecord"};
    if (listed(name, gated_names, sizeof gated_names / sizeof *gated_names))
        return ESCAPED;
    for (size_t i = 0; i < sizeof quiet / sizeof *quiet; i++)
        if (strstr(name, quiet[i]) != NULL)
            return UNSEEN;
    if (listed(name, other_names, sizeof other_names / sizeof *other_names))
        return OTHER;
    for (size_t i = 0; i < sizeof work / sizeof *work; i++)
        if (strstr(name, work[i]) != NULL && strstr(name, "Node") == NULL)
            return ESCAPED;
    return OTHER;
}

static unsigned index_locked(const char *name)
{
    for (unsigned i = 1; i < name_count; i++)
        if (strcmp(names[i].name, name) == 0)
            return i;
    if (name_count == MOST_NAMES)
        return 0;
    names[name_count] = (named){name, classify(name)};
    return name_count++;
}

static unsigned index_of(const char *name)
{
    size_t cell = ((uintptr_t)name >> 2) * 2654435761u % NAME_CELLS;
    /* Acquire pairs with the release below: the index was written before. */
    if (atomic_load_explicit(&cell_name[cell], memory_order_acquire) == name)
        return cell_index[cell];
    pthread_mutex_lock(&lock);
    unsigned index = index_locked(name);
    if (atomic_load_explicit(&cell_name[cell], memory_order_relaxed) == NULL) { /* written once */
        cell_index[cell] = (uint16_t)index;
        atomic_store_explicit(&cell_name[cell], name, memory_order_release); /* pairs with the acquire above */
    }
    pthread_mutex_unlock(&lock);
    return index;
}

static void store(uint32_t correlation, uint16_t what, unsigned name)
{
    _Atomic uint64_t *cell = &ring[correlation % RING];
    /* Relaxed: one word; CUPTI delivers the work's record after the call. */
    uint64_t seen = atomic_load_explicit(cell, memory_order_relaxed);
    if (correlation == 0 || (seen >> 32 == correlation && (uint16_t)(seen >> 16) >= what))
        return;
    atomic_store_explicit(cell, (uint64_t)correlation << 32 | (uint64_t)what << 16 | name, memory_order_relaxed);
}

static nvs_escape *escape_locked(const char *function, const char *symbol)
{
    if (symbol == NULL)
        symbol = "";
    for (unsigned i = 0; i < tally.escape_count; i++)
        if (strcmp(tally.escapes[i].function, function) == 0 && strcmp(tally.escapes[i].symbol, symbol) == 0)
            return &tally.escapes[i];
    if (tally.escape_count == NVS_MOST_ESCAPES)
        return &tally.escapes[NVS_MOST_ESCAPES - 1];
    nvs_escape *made = &tally.escapes[tally.escape_count];
    const bool last = tally.escape_count == NVS_MOST_ESCAPES - 1;
    made->symbol = last ? NULL : strdup(symbol);
    made->function = last || made->symbol == NULL ? "(others)" : function;
    if (made->symbol == NULL)
        made->symbol = "";
    tally.escape_count++;
    return made;
}

void nvs_tally_call(const char *function, const char *symbol, nvs_passage passage, uint32_t correlation, uint32_t outer_correlation)
{
    uint16_t what = passage == NVS_PASSAGE_HOOK ? HOOK : GATED;
    unsigned name = 0;
    if (passage == NVS_PASSAGE_GATED) {
        atomic_fetch_add_explicit(&gated_calls, 1, memory_order_relaxed);
    } else if (passage == NVS_PASSAGE_NONE) {
        name = index_of(function);
        what = names[name].what; /* written once, before any thread had its index */
        if (what == UNSEEN)
            return;
    }
    store(correlation, what, name);
    store(outer_correlation, what, name);
    if (what == ESCAPED) {
        pthread_mutex_lock(&lock);
        escape_locked(name != 0 ? function : names[0].name, symbol)->calls++;
        pthread_mutex_unlock(&lock);
    }
}

void nvs_tally_work(nvs_work kind, const char *symbol, uint32_t correlation, bool matched)
{
    uint64_t seen = atomic_load_explicit(&ring[correlation % RING], memory_order_relaxed); /* as in store */
    unsigned what = seen >> 32 == correlation && correlation != 0 ? (uint16_t)(seen >> 16) : UNSEEN;
    pthread_mutex_lock(&lock);
    tally.ran[kind]++;
    if (!matched || what == GATED)
        tally.gated[kind] += matched;
    else if (what == HOOK || (kind != NVS_WORK_KERNEL && (what == OTHER || correlation == 0)))
        tally.own[kind]++;
    else
        escape_locked(what == UNSEEN ? names[0].name : names[(uint16_t)seen].name, kind == NVS_WORK_KERNEL ? symbol : "")->ran++;
    pthread_mutex_unlock(&lock);
}

void nvs_tally_lost(uint64_t records)
{
    pthread_mutex_lock(&lock);
    tally.lost_records += records;
    pthread_mutex_unlock(&lock);
}

void nvs_tally_copy(nvs_tally *out)
{
    pthread_mutex_lock(&lock);
    *out = tally;
    pthread_mutex_unlock(&lock);
    out->gated_calls = atomic_load_explicit(&gated_calls, memory_order_relaxed);
}
