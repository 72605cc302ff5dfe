/* Calls through the hook or past it, switched inside one process: a library of the benchmarks, used by in_process.h and in_process.py.
 *
 * Whoever calls the driver keeps its functions' addresses in memory: a runtime in tables, a stub library in variables, ctypes on
 * the heap, a linked program in its GOT.  Under the hook these are addresses of the hook's wrappers.  This finds every
 * such word and writes the driver's own address there, and the wrapper's back.  So the same process does the same work on the
 * same streams with and without the wrappers, and nothing else differs.
 *
 * Switched are functions that launch, copy, set, wait or ask, and keep nothing in the hook but counts; with one GPU also those
 * that change the current context or a graph that is ready to run.  Never those that allocate, free, map, capture, create or
 * destroy: what one of them did, the hook has to know at the other; but see switched_with_pools.
 *
 * Looked through are the writable segments of all loaded objects (also what was sealed after relocation), the heap and private
 * anonymous memory; not stacks, whose words do not last.  Reading goes through /proc/self/mem, because other threads may
 * unmap meanwhile; a word is written only while it holds what was found there.
 *
 * Non-goals: timing, what a case does.
 */
#define _GNU_SOURCE /* RTLD_DEFAULT, dl_iterate_phdr */
#include "driver_symbol.h"
#include "memory_ranges.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { MAX_FUNCTIONS = 1024, CHUNK = 1 << 18, GPUS = 64 };

typedef struct function { /* in static memory, which is not looked through */
    const char *name;
    uintptr_t hooked, direct;
    unsigned words;
} function;

typedef struct word {
    uintptr_t *at;
    unsigned function;
    bool sealed;
} word;

static function functions[MAX_FUNCTIONS];
static unsigned function_count;
static word *words;
static size_t word_count, word_room;
static int memory = -1, pages = -1;
static bool direct_now, one_gpu, with_pools;
static char answer[1 << 16], reason[256];

static const char *const switched[] = {
    "cuLaunch", "cuGraphLaunch", "cuGraphUpload", "cuMemcpy", "cuMemset", "cuMemPrefetch", "cuMemAdvise", "cuMemDiscard",
    "cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuStreamWaitValue", "cuStreamWriteValue",
    "cuStreamBatchMemOp", "cuStreamAddCallback", "cuStreamAttachMemAsync", "cuCtxWaitEvent", "cuPointerGetAttribute",
};
/* Only for steps that free what they allocate: then the hook has missed both, or neither. */
static const char *const switched_with_pools[] = {"cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemFreeAsync"};
/* The hook only forgets there what it knew of the thread: one GPU is always the same one.  And it waits until memory that a graph names is
 * there, which it is for who is alone, and looks whether another GPU's is named. */
static const char *const switched_with_one_gpu[] = {
    "cuCtxSetCurrent", "cuCtxPushCurrent", "cuCtxPopCurrent", "cuGraphExecUpdate", "cuGraphExecChildGraphNodeSetParams",
    "cuGraphExecMemcpyNodeSetParams", "cuGraphExecMemsetNodeSetParams",
};

static bool begins_with_one_of(const char *name, const char *const *list, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (strncmp(name, list[i], strlen(list[i])) == 0)
            return true;
    return false;
}

#define BEGINS_WITH_ONE_OF(name, list) begins_with_one_of(name, list, sizeof(list) / sizeof(list)[0])

static const char *failed(const char *why)
{
    snprintf(answer, sizeof answer, "{\"error\": \"in one process: %s\"}", why);
    return answer;
}

/* ---- Functions ---- */

static int find_one(const char *name, void *address, void *argument)
{
    void **found = argument;
    (void)name;
    *found = address;
    return 1;
}

typedef struct named {
    const char *name;
    void *address;
} named;

static int find_named(const char *name, void *address, void *argument)
{
    named *want = argument;
    return strcmp(name, want->name) == 0 ? find_one(name, address, &want->address) : 0;
}

static void *driver_function(const char *name)
{
    named want = {name, NULL};
    (void)driver_each_symbol(find_named, &want);
    return want.address;
}

/* All that may be switched; which of them the hook wraps is asked later, because dlsym() may not be called from here. */
static int consider(const char *name, void *address, void *unused)
{
    (void)unused;
    if (!BEGINS_WITH_ONE_OF(name, switched) && !(one_gpu && BEGINS_WITH_ONE_OF(name, switched_with_one_gpu)) &&
        !(with_pools && BEGINS_WITH_ONE_OF(name, switched_with_pools)))
        return 0;
    if (function_count == MAX_FUNCTIONS)
        return 1;
    functions[function_count++] = (function){name, 0, (uintptr_t)address, 0};
    return 0;
}

/* Sorts by the wrapper's address, in place: qsort() would leave a copy of these addresses on the heap. */
static void keep_wrapped(void *library)
{
    unsigned kept = 0;
    for (unsigned i = 0; i < function_count; i++) {
        function one = functions[i];
        one.hooked = (uintptr_t)dlsym(library, one.name); /* answered by the hook, if there is one */
        bool known = one.hooked == 0 || one.hooked == one.direct;
        for (unsigned other = 0; other < kept && !known; other++)
            known = functions[other].hooked == one.hooked;
        if (known)
            continue;
        unsigned place = kept++;
        for (; place > 0 && functions[place - 1].hooked > one.hooked; place--)
            functions[place] = functions[place - 1];
        functions[place] = one;
    }
    function_count = kept;
}

static bool learn_functions(void)
{
    int (*count_devices)(int *) = NULL;
    int devices = 0;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    function_count = 0;
    if (library == NULL) {
        snprintf(reason, sizeof reason, "the driver is not loaded");
        return false;
    }
    *(void **)&count_devices = dlsym(library, "cuDeviceGetCount");
    one_gpu = count_devices != NULL && count_devices(&devices) == 0 && devices == 1;
    const bool all = driver_each_symbol(consider, NULL) == 0;
    const bool any = function_count != 0;
    keep_wrapped(library);
    if (all && function_count != 0)
        return true;
    snprintf(reason, sizeof reason, "%s", !all  ? "the driver has more functions than there is room for"
                                          : any ? "no function of the driver is wrapped: is the program under the hook?"
                                                : "the driver's symbol table cannot be read");
    function_count = 0;
    return false;
}

static unsigned function_at(uintptr_t value)
{
    unsigned low = 0, high = function_count;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (functions[middle].hooked < value)
            low = middle + 1;
        else
            high = middle;
    }
    return low < function_count && functions[low].hooked == value ? low : MAX_FUNCTIONS;
}

/* ---- Looking ---- */

static bool note(uintptr_t *at, unsigned which, bool sealed)
{
    for (size_t i = 0; i < word_count; i++)
        if (words[i].at == at)
            return true; /* what an object has, /proc/self/maps may show as anonymous */
    if (word_count == word_room) {
        const size_t room = word_room == 0 ? 256 : 2 * word_room;
        word *more = realloc(words, room * sizeof *words);
        if (more == NULL)
            return false;
        words = more;
        word_room = room;
    }
    words[word_count++] = (word){at, which, sealed};
    functions[which].words++;
    return true;
}

/* Is the page there, and to be looked at?  Reading one that was never touched would only make pages of zeros. */
static bool wanted(uintptr_t address, bool anonymous)
{
    uint64_t entry;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (unsigned i = 0; i < left_out_count; i++)
        if (address >= left_out[i].from && address < left_out[i].to)
            return false;
    if (!anonymous || pages < 0 || pread(pages, &entry, sizeof entry, (off_t)(address / page * sizeof entry)) != sizeof entry)
        return true;
    return (entry & (UINT64_C(3) << 62)) != 0; /* present, or swapped out */
}

static bool look_through(const range *where)
{
    static uintptr_t buffer[CHUNK / sizeof(uintptr_t)];
    const uintptr_t lowest = functions[0].hooked, highest = functions[function_count - 1].hooked;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    uintptr_t at = where->from;
    while (at < where->to) {
        uintptr_t end = at - at % page + page;
        if (!wanted(at, where->anonymous)) {
            at = end;
            continue;
        }
        while (end < where->to && end - at + page <= CHUNK && wanted(end, where->anonymous))
            end += page;
        if (end > where->to)
            end = where->to;
        const ssize_t got = pread(memory, buffer, end - at, (off_t)at);
        for (ssize_t i = 0; i < got / (ssize_t)sizeof *buffer; i++) {
            if (buffer[i] < lowest || buffer[i] > highest)
                continue;
            const unsigned which = function_at(buffer[i]);
            if (which != MAX_FUNCTIONS && !note((uintptr_t *)at + i, which, where->sealed))
                return false;
        }
        at = end;
    }
    return true;
}

static const char *told_of_words(void)
{
    size_t length = (size_t)snprintf(answer, sizeof answer, "{\"words\": %zu, \"one_gpu\": %s, \"functions\": {", word_count,
                                     one_gpu ? "true" : "false");
    const char *comma = "";
    for (unsigned i = 0; i < function_count && length < sizeof answer - 256; i++) {
        if (functions[i].words == 0)
            continue;
        length += (size_t)snprintf(answer + length, sizeof answer - length, "%s\"%s\": %u", comma, functions[i].name,
                                   functions[i].words);
        comma = ", ";
    }
    snprintf(answer + length, sizeof answer - length, "}}");
    return answer;
}

static const char *find_words(void)
{
    /* The hook with its own tables, and this library with a list of all functions. */
    uintptr_t excluded[] = {functions[0].hooked, (uintptr_t)functions};
    range_count = left_out_count = 0;
    word_count = 0;
    for (unsigned i = 0; i < function_count; i++)
        functions[i].words = 0;
    if (dl_iterate_phdr(add_object, excluded) != 0 || !add_anonymous() || range_count == MAX_RANGES)
        return failed("the program's memory map cannot be read, or is too long");
    for (unsigned i = 0; i < range_count; i++)
        if (!look_through(&ranges[i]))
            return failed("out of memory");
    return word_count == 0 ? failed("no word in memory holds the address of a wrapper") : told_of_words();
}

/* ---- Switching ---- */

static bool set(const word *one, uintptr_t from, uintptr_t to)
{
    uintptr_t value;
    if (pread(memory, &value, sizeof value, (off_t)(uintptr_t)one->at) != sizeof value || value != from)
        return false; /* freed meanwhile, or used for something else */
    if (one->sealed)
        return pwrite(memory, &to, sizeof to, (off_t)(uintptr_t)one->at) == sizeof to;
    /* Relaxed: a reader gets one address or the other, and both are right. */
    __atomic_store_n(one->at, to, __ATOMIC_RELAXED);
    return true;
}

/* The hook may believe in a context that was left behind its back: it is told again which one is current. */
static void refresh_current(void)
{
    void *context = NULL, *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    int (*get)(void **), (*tell)(void *);
    if (!one_gpu || library == NULL)
        return;
    *(void **)&get = driver_function("cuCtxGetCurrent");
    *(void **)&tell = dlsym(library, "cuCtxSetCurrent");
    if (get != NULL && tell != NULL && get(&context) == 0 && context != NULL)
        (void)tell(context);
}

static uint64_t gated_calls(void)
{
    struct { /* nvshare.h */
        uint32_t size, lease;
        uint64_t lease_id;
        uint32_t waiters, waiting_threads;
        uint64_t calls, allocated_bytes, resident_bytes;
    } state;
    int (*ask)(uint32_t, void *) = NULL;
    uint64_t calls = 0;
    *(void **)&ask = dlsym(RTLD_DEFAULT, "nvshare_gpu_state");
    for (uint32_t gpu = 0; ask != NULL && gpu < GPUS; gpu++) {
        memset(&state, 0, sizeof state);
        state.size = sizeof state;
        if (ask(gpu, &state) == 0)
            calls += state.calls;
    }
    return calls;
}

static const char *go(bool direct)
{
    size_t changed = 0;
    for (size_t i = 0; direct != direct_now && i < word_count; i++) {
        const function *which = &functions[words[i].function];
        changed += direct ? set(&words[i], which->hooked, which->direct) : set(&words[i], which->direct, which->hooked);
    }
    if (!direct && direct_now)
        refresh_current();
    direct_now = direct;
    snprintf(answer, sizeof answer, "{\"changed\": %zu, \"calls\": %llu}", changed, (unsigned long long)gated_calls());
    return answer;
}

/* `which`: look or look-pools (finds the words; from then on by the hook), hook, direct.  JSON; valid until the next call. */
__attribute__((visibility("default"))) const char *nvshare_bench_by(const char *which)
{
    if (memory < 0 && (memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC)) < 0)
        return failed("/proc/self/mem cannot be opened");
    if (pages < 0)
        pages = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC); /* without it everything is read */
    if (strncmp(which, "look", 4) == 0) {
        (void)go(false);
        word_count = 0;
        with_pools = strcmp(which, "look-pools") == 0;
        return learn_functions() ? find_words() : failed(reason);
    }
    if (word_count == 0)
        return failed("nothing was looked for");
    return go(strcmp(which, "direct") == 0);
}
