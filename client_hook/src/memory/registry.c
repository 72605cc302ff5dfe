/* See registry.h. */
#include "memory/registry.h"

#include "memory/quota.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Everything below is protected by `lock`, except where a comment says otherwise. */
NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static nvs_allocation *roots[NVS_SPACES]; /* treaps: ordered by key, heaps by priority */
NVS_FORK_STATE static nvs_allocation *of_gpu[NVS_MAX_GPUS]; /* all entries, linked by `node.next` */
NVS_FORK_STATE static nvs_allocation *first_deferred[NVS_MAX_GPUS], *last_deferred[NVS_MAX_GPUS]; /* linked by `deferred.later` */
static uint64_t last_serial;
static uint32_t random_state = 0x9e3779b9u; /* any non-zero start: it only balances the trees */

/* Written under the lock; read without it: an old value only delays the end of a free. */
NVS_FORK_STATE static _Atomic uint32_t deferred_count[NVS_MAX_GPUS];
NVS_FORK_STATE static _Atomic uint64_t deferred_bytes[NVS_MAX_GPUS];

void nvs_registry_lock(void)
{
    pthread_mutex_lock(&lock);
}

void nvs_registry_unlock(void)
{
    pthread_mutex_unlock(&lock);
}

/* Splits by key: all of `tree` below `key` into *low, the others into *high. */
static void split(nvs_allocation *tree, uint64_t key, nvs_allocation **low, nvs_allocation **high)
{
    while (tree != NULL) {
        if (tree->key < key) {
            *low = tree;
            low = &tree->node.right;
            tree = tree->node.right;
        } else {
            *high = tree;
            high = &tree->node.left;
            tree = tree->node.left;
        }
    }
    *low = NULL;
    *high = NULL;
}

/* The reverse, for two trees of which every key in `low` is smaller. */
static nvs_allocation *merge(nvs_allocation *low, nvs_allocation *high)
{
    nvs_allocation *root = NULL, **link = &root;
    while (low != NULL && high != NULL) {
        if (low->node.priority >= high->node.priority) {
            *link = low;
            link = &low->node.right;
            low = low->node.right;
        } else {
            *link = high;
            link = &high->node.left;
            high = high->node.left;
        }
    }
    *link = low != NULL ? low : high;
    return root;
}

static uint64_t extent_of(const nvs_allocation *allocation)
{
    return allocation->length != 0 ? allocation->length : 1;
}

/* The entry that contains `key`. */
static nvs_allocation *registry_find(nvs_space space, uint64_t key)
{
    nvs_allocation *best = NULL;
    for (nvs_allocation *at = roots[space]; at != NULL;) {
        if (at->key <= key) {
            best = at;
            at = at->node.right;
        } else {
            at = at->node.left;
        }
    }
    return best != NULL && key - best->key < extent_of(best) ? best : NULL;
}

/* The first entry that begins at `key` or after. */
static nvs_allocation *registry_next(nvs_space space, uint64_t key)
{
    nvs_allocation *best = NULL;
    for (nvs_allocation *at = roots[space]; at != NULL;) {
        if (at->key >= key) {
            best = at;
            at = at->node.left;
        } else {
            at = at->node.right;
        }
    }
    return best;
}

static void registry_undefer(nvs_allocation *allocation)
{
    uint32_t gpu = allocation->gpu;
    if (allocation->deferred.earlier != NULL)
        allocation->deferred.earlier->deferred.later = allocation->deferred.later;
    else
        first_deferred[gpu] = allocation->deferred.later;
    if (allocation->deferred.later != NULL)
        allocation->deferred.later->deferred.earlier = allocation->deferred.earlier;
    else
        last_deferred[gpu] = allocation->deferred.earlier;
    allocation->deferred.later = allocation->deferred.earlier = NULL;
    allocation->deferred.dying = false;
    /* Pair with the loads in nvs_registry_deferred and _bytes; only hints. */
    atomic_fetch_sub_explicit(&deferred_count[gpu], 1, memory_order_relaxed);
    atomic_fetch_sub_explicit(&deferred_bytes[gpu], allocation->charged_bytes, memory_order_relaxed);
}

/* Its free waits for a stream. */
static void registry_defer(nvs_allocation *allocation)
{
    const uint32_t gpu = allocation->gpu;
    allocation->deferred.later = NULL;
    allocation->deferred.earlier = last_deferred[gpu];
    if (last_deferred[gpu] != NULL)
        last_deferred[gpu]->deferred.later = allocation;
    else
        first_deferred[gpu] = allocation;
    last_deferred[gpu] = allocation;
    /* Pair with the loads in nvs_registry_deferred and _bytes; only hints. */
    atomic_fetch_add_explicit(&deferred_count[gpu], 1, memory_order_relaxed);
    atomic_fetch_add_explicit(&deferred_bytes[gpu], allocation->charged_bytes, memory_order_relaxed);
}

static void registry_remove(nvs_allocation *allocation)
{
    if (!allocation->node.linked)
        return;
    nvs_allocation **link = &roots[allocation->node.space];
    while (*link != allocation)
        link = (*link)->key < allocation->key ? &(*link)->node.right : &(*link)->node.left;
    *link = merge(allocation->node.left, allocation->node.right);
    allocation->node.left = allocation->node.right = NULL;
    if (allocation->node.previous != NULL)
        allocation->node.previous->node.next = allocation->node.next;
    else
        of_gpu[allocation->gpu] = allocation->node.next;
    if (allocation->node.next != NULL)
        allocation->node.next->node.previous = allocation->node.previous;
    allocation->node.next = allocation->node.previous = NULL;
    allocation->node.linked = false;
    if (allocation->deferred.dying)
        registry_undefer(allocation);
}

/* A mapping has ended: adds it to a list, and its handle if that has no other user. */
static void registry_end_mapping(nvs_allocation *mapping, nvs_allocation **list)
{
    nvs_allocation *handle = mapping->vmm.handle;
    mapping->vmm.handle = NULL;
    mapping->node.next = *list;
    *list = mapping;
    if (handle != NULL && --handle->vmm.mappings == 0 && handle->vmm.references == 0) {
        registry_remove(handle);
        handle->node.next = *list;
        *list = handle;
    }
}

/* A new entry covers this one, so its memory has ended: unlinks it, and adds it to a list if it has no other user. */
static void registry_displace(nvs_allocation *other, nvs_allocation **list)
{
    registry_remove(other);
    if (other->deferred.held) { /* a reaper has it, and sees that it is orphaned */
        other->deferred.orphaned = true;
        other->context = NULL;
    } else if (other->kind == NVS_MEMORY_MAPPING) {
        registry_end_mapping(other, list);
    } else if (other->vmm.mappings != 0) {
        other->vmm.references = 0; /* a handle that lives on through its mappings */
    } else {
        other->node.next = *list;
        *list = other;
    }
}

/* As nvs_allocation_insert. */
static nvs_allocation *registry_insert(nvs_allocation *allocation)
{
    nvs_space space = allocation->node.space;
    nvs_allocation *stale = NULL;
    uint64_t end = allocation->key + extent_of(allocation);
    for (nvs_allocation *other = registry_find(space, allocation->key);;) {
        if (other == NULL)
            other = registry_next(space, allocation->key);
        if (other == NULL || other->key >= end)
            break;
        registry_displace(other, &stale);
        other = NULL;
    }

    allocation->node.serial = ++last_serial;
    random_state ^= random_state << 13; /* xorshift32 */
    random_state ^= random_state >> 17;
    random_state ^= random_state << 5;
    allocation->node.priority = random_state;
    nvs_allocation **link = &roots[space];
    while (*link != NULL && (*link)->node.priority >= allocation->node.priority)
        link = (*link)->key < allocation->key ? &(*link)->node.right : &(*link)->node.left;
    nvs_allocation *below = *link;
    split(below, allocation->key, &allocation->node.left, &allocation->node.right);
    *link = allocation;
    allocation->node.previous = NULL;
    allocation->node.next = of_gpu[allocation->gpu];
    if (allocation->node.next != NULL)
        allocation->node.next->node.previous = allocation;
    of_gpu[allocation->gpu] = allocation;
    allocation->node.linked = true;
    return stale;
}

uint32_t nvs_registry_deferred(uint32_t gpu)
{
    /* Pairs with the updates in registry_defer and registry_undefer; only a hint. */
    return atomic_load_explicit(&deferred_count[gpu], memory_order_relaxed);
}

uint64_t nvs_registry_deferred_bytes(uint32_t gpu)
{
    /* As above. */
    return atomic_load_explicit(&deferred_bytes[gpu], memory_order_relaxed);
}

NVS_FORK_CODE void nvs_registry_after_fork(void)
{
    /* The parent's other threads do not exist here and one of them may have held the lock.  The entries stand for
     * memory that this process cannot use; they are left where they are, unreachable. */
    pthread_mutex_init(&lock, NULL);
    for (uint32_t space = 0; space < NVS_SPACES; space++)
        roots[space] = NULL;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        of_gpu[gpu] = first_deferred[gpu] = last_deferred[gpu] = NULL;
        atomic_store_explicit(&deferred_count[gpu], 0, memory_order_relaxed); /* one thread: no pair */
        atomic_store_explicit(&deferred_bytes[gpu], 0, memory_order_relaxed);
    }
}

nvs_allocation *nvs_allocation_new(nvs_space space, nvs_memory_kind kind, uint32_t gpu)
{
    nvs_allocation *allocation = calloc(1, sizeof *allocation);
    if (allocation == NULL)
        return NULL;
    allocation->node.space = (uint8_t)space;
    allocation->kind = (uint8_t)kind;
    allocation->gpu = gpu;
    return allocation;
}

/* --- one step each, under the lock --- */

nvs_allocation *nvs_allocation_insert(nvs_allocation *allocation)
{
    nvs_registry_lock();
    nvs_allocation *stale = registry_insert(allocation);
    nvs_registry_unlock();
    return stale;
}

nvs_lookup nvs_allocation_take(nvs_space space, uint64_t key, nvs_allocation **out)
{
    nvs_lookup result = NVS_ABSENT;
    nvs_registry_lock();
    nvs_allocation *found = registry_find(space, key);
    if (found != NULL && found->key == key) {
        result = found->deferred.dying ? NVS_DYING : NVS_FOUND;
        if (result == NVS_FOUND) {
            registry_remove(found);
            *out = found;
        }
    }
    nvs_registry_unlock();
    return result;
}

nvs_lookup nvs_allocation_find(nvs_space space, uint64_t key, nvs_allocation *copy)
{
    nvs_lookup result = NVS_ABSENT;
    nvs_registry_lock();
    const nvs_allocation *found = registry_find(space, key);
    if (found != NULL) {
        *copy = *found;
        result = found->deferred.dying ? NVS_DYING : NVS_FOUND;
    }
    nvs_registry_unlock();
    return result;
}

nvs_allocation *nvs_allocation_take_context(CUcontext context)
{
    nvs_allocation *taken = NULL;
    if (context == NULL)
        return NULL;
    nvs_registry_lock();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        for (nvs_allocation *at = of_gpu[gpu], *next; at != NULL; at = next) {
            next = at->node.next;
            if (at->deferred.context == context)
                at->deferred.context = NULL;
            if (at->context != context)
                continue;
            registry_displace(at, &taken);
        }
    }
    nvs_registry_unlock();
    return taken;
}

bool nvs_allocation_set_pool(uint64_t key, struct nvs_pool_figures *pool, uint64_t bytes)
{
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_ADDRESS, key);
    const bool known = found != NULL && found->key == key;
    if (known) {
        found->pool.figures = pool;
        found->pool.bytes = bytes;
    }
    nvs_registry_unlock();
    return known;
}

struct nvs_pool_figures *nvs_allocation_take_pool(uint64_t key, uint64_t *bytes)
{
    struct nvs_pool_figures *pool = NULL;
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_ADDRESS, key);
    if (found != NULL && found->key == key) {
        pool = found->pool.figures;
        *bytes = found->pool.bytes;
        found->pool.figures = NULL;
    }
    nvs_registry_unlock();
    return pool;
}

uint64_t nvs_allocation_charged(uint32_t gpu, nvs_memory_kind kind)
{
    uint64_t sum = 0;
    nvs_registry_lock();
    for (const nvs_allocation *at = of_gpu[gpu]; at != NULL; at = at->node.next)
        sum += at->kind == kind ? at->charged_bytes : 0;
    nvs_registry_unlock();
    return sum;
}

size_t nvs_allocation_extents(uint32_t gpu, bool resident, nvs_extent *out, size_t room)
{
    size_t count = 0;
    nvs_registry_lock();
    for (const nvs_allocation *at = of_gpu[gpu]; at != NULL; at = at->node.next) {
        if (!at->backend.movable || at->deferred.dying || (resident ? at->evicted_bytes >= at->charged_bytes : at->evicted_bytes == 0))
            continue;
        if (count < room)
            out[count] = (nvs_extent){at->key, at->length, at->charged_bytes, at->evicted_bytes, at->node.serial, at->context};
        count++;
    }
    nvs_registry_unlock();
    return count;
}

void nvs_memory_set_evicted(uint32_t gpu, const nvs_extent *extent, uint64_t evicted_bytes)
{
    int64_t change = 0; /* also if the entry has ended */
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_ADDRESS, extent->key);
    if (found != NULL && found->node.serial == extent->serial) {
        change = (int64_t)(evicted_bytes - found->evicted_bytes);
        found->evicted_bytes = evicted_bytes;
    }
    nvs_registry_unlock();
    if (change == 0)
        return;
    atomic_fetch_add_explicit(&nvs_ledgers[gpu].evicted, change, memory_order_relaxed); /* see memory/quota.h */
    nvs_coordinator.memory_changed(gpu);
}

/* --- deferred frees --- */

nvs_lookup nvs_allocation_defer(uint64_t key, CUevent event, CUcontext context, uint64_t freed_on)
{
    nvs_lookup result = NVS_ABSENT;
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_ADDRESS, key);
    if (found != NULL && found->key == key) {
        result = found->deferred.dying ? NVS_DYING : NVS_FOUND;
        if (result == NVS_FOUND) {
            found->deferred.dying = true;
            found->deferred.event = event;
            found->deferred.context = context;
            found->deferred.stream = freed_on;
            registry_defer(found);
        }
    }
    nvs_registry_unlock();
    return result;
}

bool nvs_allocation_revive(const nvs_allocation *wanted, size_t bytes, uint64_t *key, CUevent *event)
{
    enum { LOOK_AT = 256 }; /* the newest: a loop frees and allocates the same few again and again */
    bool found = false;
    nvs_registry_lock();
    nvs_allocation *at = last_deferred[wanted->gpu];
    for (unsigned seen = 0; at != NULL && seen < LOOK_AT && !found; seen++) {
        found = !at->deferred.held && at->deferred.stream == wanted->deferred.stream && at->context == wanted->context &&
                at->charged_bytes == wanted->charged_bytes && at->length >= bytes;
        if (!found)
            at = at->deferred.earlier;
    }
    if (found) {
        *key = at->key;
        *event = at->deferred.event;
        registry_undefer(at);
    }
    nvs_registry_unlock();
    return found;
}

size_t nvs_allocation_hold_deferred(uint32_t gpu, nvs_allocation **out, size_t room)
{
    size_t count = 0;
    nvs_registry_lock();
    for (nvs_allocation *at = first_deferred[gpu]; at != NULL && count < room; at = at->deferred.later) {
        if (at->deferred.held)
            continue;
        at->deferred.held = true;
        out[count++] = at;
    }
    nvs_registry_unlock();
    return count;
}

void nvs_allocation_contexts(const nvs_allocation *held, CUcontext *memory, CUcontext *event)
{
    nvs_registry_lock();
    *memory = held->context;
    *event = held->deferred.context;
    nvs_registry_unlock();
}

bool nvs_allocation_unhold(nvs_allocation *held)
{
    nvs_registry_lock();
    held->deferred.held = false;
    bool orphaned = held->deferred.orphaned;
    nvs_registry_unlock();
    return orphaned;
}

bool nvs_allocation_end_deferred(nvs_allocation *held)
{
    nvs_registry_lock();
    held->deferred.held = false;
    bool alive = !held->deferred.orphaned;
    registry_remove(held);
    nvs_registry_unlock();
    return alive;
}

/* --- the application's own virtual memory management --- */

nvs_allocation *nvs_allocation_pin_handle(uint64_t handle)
{
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_HANDLE, handle);
    if (found != NULL)
        found->vmm.mappings++;
    nvs_registry_unlock();
    return found;
}

nvs_allocation *nvs_allocation_map(nvs_allocation *mapping, nvs_allocation *pinned)
{
    nvs_registry_lock();
    mapping->vmm.handle = pinned;
    nvs_allocation *stale = registry_insert(mapping);
    nvs_registry_unlock();
    return stale;
}

nvs_allocation *nvs_allocation_unpin_handle(nvs_allocation *pinned)
{
    nvs_registry_lock();
    bool last = --pinned->vmm.mappings == 0 && pinned->vmm.references == 0;
    if (last)
        registry_remove(pinned);
    nvs_registry_unlock();
    return last ? pinned : NULL;
}

nvs_allocation *nvs_allocation_pin_mapping(uint64_t address, uint64_t length, nvs_allocation *copy)
{
    nvs_allocation *handle = NULL;
    nvs_registry_lock();
    const nvs_allocation *at = registry_find(NVS_SPACE_ADDRESS, address);
    if (at == NULL)
        at = registry_next(NVS_SPACE_ADDRESS, address);
    while (at != NULL && (at->key <= address || at->key - address < length)) {
        if (at->kind == NVS_MEMORY_MAPPING && at->backend.chunked) {
            handle = at->vmm.handle;
            handle->vmm.mappings++;
            *copy = *at;
            break;
        }
        at = registry_next(NVS_SPACE_ADDRESS, at->key + 1);
    }
    nvs_registry_unlock();
    return handle;
}

bool nvs_allocation_overlaps(nvs_space space, uint64_t address, uint64_t length)
{
    nvs_registry_lock();
    bool found = registry_find(space, address) != NULL;
    if (!found) {
        const nvs_allocation *next = registry_next(space, address);
        found = next != NULL && next->key - address < length;
    }
    nvs_registry_unlock();
    return found;
}

nvs_allocation *nvs_allocation_take_mappings(uint64_t address, uint64_t length)
{
    nvs_allocation *taken = NULL;
    nvs_registry_lock();
    for (;;) {
        nvs_allocation *at = registry_next(NVS_SPACE_ADDRESS, address);
        while (at != NULL && at->kind != NVS_MEMORY_MAPPING && at->key - address < length)
            at = registry_next(NVS_SPACE_ADDRESS, at->key + 1);
        if (at == NULL || at->key - address >= length)
            break;
        registry_remove(at);
        at->node.next = taken;
        taken = at;
    }
    nvs_registry_unlock();
    return taken;
}

nvs_allocation *nvs_allocation_end_mappings(nvs_allocation *taken, bool unmapped)
{
    nvs_allocation *list = NULL;
    nvs_registry_lock();
    while (taken != NULL) {
        nvs_allocation *next = taken->node.next;
        taken->node.next = NULL;
        if (unmapped) {
            registry_end_mapping(taken, &list);
        } else {
            nvs_allocation *stale = registry_insert(taken);
            while (stale != NULL) {
                nvs_allocation *after = stale->node.next;
                stale->node.next = list;
                list = stale;
                stale = after;
            }
        }
        taken = next;
    }
    nvs_registry_unlock();
    return list;
}

bool nvs_allocation_release_handle(uint64_t handle, nvs_allocation **last)
{
    *last = NULL;
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_HANDLE, handle);
    bool counted = found != NULL && found->vmm.references != 0;
    if (counted && --found->vmm.references == 0 && found->vmm.mappings == 0) {
        registry_remove(found);
        *last = found;
    }
    nvs_registry_unlock();
    return counted;
}

void nvs_allocation_retain_handle(uint64_t handle)
{
    nvs_registry_lock();
    nvs_allocation *found = registry_find(NVS_SPACE_HANDLE, handle);
    if (found != NULL)
        found->vmm.references++;
    nvs_registry_unlock();
}
