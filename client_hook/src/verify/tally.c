/* See verify.h.
 *
 * A call is remembered by its correlation in a ring of one word each: what names a call older than the ring's 4 M newest is
 * not found any more, and counts as unseen.  Words are written by the calling thread and read when the work has ended.
 * Calls that only ask or wait are not remembered: polling would push everything else out.
 */
#include "verify/verify.h"

#include "base/base.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { RING = 1 << 22, MOST_NAMES = 1024, NAME_CELLS = 4096 };

/* What is known of a call, in the order in which it weighs when several share a correlation. */
enum { UNSEEN, OTHER, HOOK, GATED, ESCAPED };

typedef struct named {
    const char *name;
    uint16_t what; /* OTHER or ESCAPED; UNSEEN: asks or waits */
} named;

static _Atomic uint64_t ring[RING]; /* correlation << 32 | what << 16 | name */
static named names[MOST_NAMES] = {{"(a call that was not seen)", ESCAPED}};
static unsigned name_count = 1;
static _Atomic(const char *) cell_name[NAME_CELLS]; /* by the address of the name, which CUPTI keeps */
static uint16_t cell_index[NAME_CELLS];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static nvs_books books;
static _Atomic uint64_t gated_calls; /* a count; orders nothing */

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

/* What a call outside of the gate is.  A name that no table has is judged by its words. */
static uint16_t judge(const char *name)
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
    names[name_count] = (named){name, judge(name)};
    return name_count++;
}

static unsigned index_of(const char *name)
{
    size_t cell = ((uintptr_t)name >> 2) * 2654435761u % NAME_CELLS;
    /* acquire: pairs with the release below, the index was written before */
    if (atomic_load_explicit(&cell_name[cell], memory_order_acquire) == name)
        return cell_index[cell];
    pthread_mutex_lock(&lock);
    unsigned index = index_locked(name);
    if (atomic_load_explicit(&cell_name[cell], memory_order_relaxed) == NULL) { /* taken once, never changed */
        cell_index[cell] = (uint16_t)index;
        atomic_store_explicit(&cell_name[cell], name, memory_order_release); /* pairs with the acquire above */
    }
    pthread_mutex_unlock(&lock);
    return index;
}

static void remember(uint32_t correlation, uint16_t what, unsigned name)
{
    _Atomic uint64_t *cell = &ring[correlation % RING];
    /* Relaxed: one word; that the work's record comes after it is CUPTI's doing. */
    uint64_t seen = atomic_load_explicit(cell, memory_order_relaxed);
    if (correlation == 0 || (seen >> 32 == correlation && (uint16_t)(seen >> 16) >= what))
        return;
    atomic_store_explicit(cell, (uint64_t)correlation << 32 | (uint64_t)what << 16 | name, memory_order_relaxed);
}

static nvs_escape *escape_locked(const char *function, const char *symbol)
{
    if (symbol == NULL)
        symbol = "";
    for (unsigned i = 0; i < books.escape_count; i++)
        if (strcmp(books.escapes[i].function, function) == 0 && strcmp(books.escapes[i].symbol, symbol) == 0)
            return &books.escapes[i];
    if (books.escape_count == NVS_MOST_ESCAPES)
        return &books.escapes[NVS_MOST_ESCAPES - 1];
    nvs_escape *made = &books.escapes[books.escape_count];
    const bool last = books.escape_count == NVS_MOST_ESCAPES - 1;
    made->symbol = last ? NULL : strdup(symbol);
    made->function = last || made->symbol == NULL ? "(others)" : function;
    if (made->symbol == NULL)
        made->symbol = "";
    books.escape_count++;
    return made;
}

void nvs_books_call(const char *function, const char *symbol, nvs_passage passage, uint32_t correlation, uint32_t outer_correlation)
{
    uint16_t what = passage == NVS_PASSAGE_HOOK ? HOOK : GATED;
    unsigned name = 0;
    if (passage == NVS_PASSAGE_GATED) {
        atomic_fetch_add_explicit(&gated_calls, 1, memory_order_relaxed);
    } else if (passage == NVS_PASSAGE_NONE) {
        name = index_of(function);
        what = names[name].what; /* written once, before its index was given out */
        if (what == UNSEEN)
            return;
    }
    remember(correlation, what, name);
    remember(outer_correlation, what, name);
    if (what == ESCAPED) {
        pthread_mutex_lock(&lock);
        escape_locked(name != 0 ? function : names[0].name, symbol)->calls++;
        pthread_mutex_unlock(&lock);
    }
}

void nvs_books_work(nvs_work kind, const char *symbol, uint32_t correlation, bool matched)
{
    uint64_t seen = atomic_load_explicit(&ring[correlation % RING], memory_order_relaxed); /* as in remember */
    unsigned what = seen >> 32 == correlation && correlation != 0 ? (uint16_t)(seen >> 16) : UNSEEN;
    pthread_mutex_lock(&lock);
    books.ran[kind]++;
    if (!matched || what == GATED)
        books.gated[kind] += matched;
    else if (what == HOOK || (kind != NVS_WORK_KERNEL && (what == OTHER || correlation == 0)))
        books.own[kind]++;
    else
        escape_locked(what == UNSEEN ? names[0].name : names[(uint16_t)seen].name, kind == NVS_WORK_KERNEL ? symbol : "")->ran++;
    pthread_mutex_unlock(&lock);
}

void nvs_books_lost(uint64_t records)
{
    pthread_mutex_lock(&lock);
    books.lost_records += records;
    pthread_mutex_unlock(&lock);
}

void nvs_books_copy(nvs_books *out)
{
    pthread_mutex_lock(&lock);
    *out = books;
    pthread_mutex_unlock(&lock);
    out->gated_calls = atomic_load_explicit(&gated_calls, memory_order_relaxed);
}
