/* See registry.h. */
#include "memory/records/registry.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

/* Everything below is protected by `lock`, except where a comment says otherwise. */
NVS_FORK_STATE static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
NVS_FORK_STATE static nvs_allocation *roots[NVS_SPACES]; /* treaps: ordered by key, heaps by priority */
NVS_FORK_STATE static nvs_allocation *of_gpu[NVS_MAX_GPUS];
NVS_FORK_STATE static nvs_allocation *first_deferred[NVS_MAX_GPUS], *last_deferred[NVS_MAX_GPUS];
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

nvs_allocation *nvs_registry_find(nvs_space space, uint64_t key)
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

nvs_allocation *nvs_registry_next(nvs_space space, uint64_t key)
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

void nvs_registry_undefer(nvs_allocation *allocation)
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

void nvs_registry_defer(nvs_allocation *allocation)
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

void nvs_registry_remove(nvs_allocation *allocation)
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
        nvs_registry_undefer(allocation);
}

void nvs_registry_end_mapping(nvs_allocation *mapping, nvs_allocation **list)
{
    nvs_allocation *handle = mapping->vmm.handle;
    mapping->vmm.handle = NULL;
    mapping->node.next = *list;
    *list = mapping;
    if (handle != NULL && --handle->vmm.mappings == 0 && handle->vmm.references == 0) {
        nvs_registry_remove(handle);
        handle->node.next = *list;
        *list = handle;
    }
}

/* A new entry covers this one, so its memory has ended: unlinks it, and adds it to a list if it has no other user. */
void nvs_registry_displace(nvs_allocation *other, nvs_allocation **list)
{
    nvs_registry_remove(other);
    if (other->deferred.held) { /* a reaper has it, and sees that it is orphaned */
        other->deferred.orphaned = true;
        other->context = NULL;
    } else if (other->kind == NVS_MEMORY_MAPPING) {
        nvs_registry_end_mapping(other, list);
    } else if (other->vmm.mappings != 0) {
        other->vmm.references = 0; /* a handle that lives on through its mappings */
    } else {
        other->node.next = *list;
        *list = other;
    }
}

nvs_allocation *nvs_registry_insert(nvs_allocation *allocation)
{
    nvs_space space = allocation->node.space;
    nvs_allocation *stale = NULL;
    uint64_t end = allocation->key + extent_of(allocation);
    for (nvs_allocation *other = nvs_registry_find(space, allocation->key);;) {
        if (other == NULL)
            other = nvs_registry_next(space, allocation->key);
        if (other == NULL || other->key >= end)
            break;
        nvs_registry_displace(other, &stale);
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

nvs_allocation *nvs_registry_first(uint32_t gpu)
{
    return of_gpu[gpu];
}

nvs_allocation *nvs_registry_first_deferred(uint32_t gpu)
{
    return first_deferred[gpu];
}

nvs_allocation *nvs_registry_last_deferred(uint32_t gpu)
{
    return last_deferred[gpu];
}

uint32_t nvs_registry_deferred(uint32_t gpu)
{
    /* Pairs with the updates in nvs_registry_defer and nvs_registry_undefer; only a hint. */
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
