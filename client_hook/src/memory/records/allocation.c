/* Registry of allocations: see allocation.h for what it promises. */
#include "memory/records/allocation.h"

#include "memory/records/registry.h"

#include <stdlib.h>

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
    nvs_allocation *stale = nvs_registry_insert(allocation);
    nvs_registry_unlock();
    return stale;
}

nvs_lookup nvs_allocation_take(nvs_space space, uint64_t key, nvs_allocation **out)
{
    nvs_lookup result = NVS_ABSENT;
    nvs_registry_lock();
    nvs_allocation *found = nvs_registry_find(space, key);
    if (found != NULL && found->key == key) {
        result = found->deferred.dying ? NVS_DYING : NVS_FOUND;
        if (result == NVS_FOUND) {
            nvs_registry_remove(found);
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
    const nvs_allocation *found = nvs_registry_find(space, key);
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
        for (nvs_allocation *at = nvs_registry_first(gpu), *next; at != NULL; at = next) {
            next = at->node.next;
            if (at->deferred.context == context)
                at->deferred.context = NULL;
            if (at->context != context)
                continue;
            nvs_registry_displace(at, &taken);
        }
    }
    nvs_registry_unlock();
    return taken;
}

bool nvs_allocation_set_pool(uint64_t key, struct nvs_pool_figures *pool, uint64_t bytes)
{
    nvs_registry_lock();
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_ADDRESS, key);
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
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_ADDRESS, key);
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
    for (const nvs_allocation *at = nvs_registry_first(gpu); at != NULL; at = at->node.next)
        sum += at->kind == kind ? at->charged_bytes : 0;
    nvs_registry_unlock();
    return sum;
}

size_t nvs_allocation_extents(uint32_t gpu, bool resident, nvs_extent *out, size_t room)
{
    size_t count = 0;
    nvs_registry_lock();
    for (const nvs_allocation *at = nvs_registry_first(gpu); at != NULL; at = at->node.next) {
        if (!at->backend.movable || at->deferred.dying || (resident ? at->evicted_bytes >= at->charged_bytes : at->evicted_bytes == 0))
            continue;
        if (count < room)
            out[count] = (nvs_extent){at->key, at->length, at->charged_bytes, at->evicted_bytes, at->node.serial, at->context};
        count++;
    }
    nvs_registry_unlock();
    return count;
}

int64_t nvs_allocation_set_evicted(uint64_t key, uint64_t serial, uint64_t evicted_bytes)
{
    int64_t change = 0;
    nvs_registry_lock();
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_ADDRESS, key);
    if (found != NULL && found->node.serial == serial) {
        change = (int64_t)(evicted_bytes - found->evicted_bytes);
        found->evicted_bytes = evicted_bytes;
    }
    nvs_registry_unlock();
    return change;
}

/* --- deferred frees --- */

nvs_lookup nvs_allocation_defer(uint64_t key, CUevent event, CUcontext context, uint64_t freed_on)
{
    nvs_lookup result = NVS_ABSENT;
    nvs_registry_lock();
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_ADDRESS, key);
    if (found != NULL && found->key == key) {
        result = found->deferred.dying ? NVS_DYING : NVS_FOUND;
        if (result == NVS_FOUND) {
            found->deferred.dying = true;
            found->deferred.event = event;
            found->deferred.context = context;
            found->deferred.stream = freed_on;
            nvs_registry_defer(found);
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
    nvs_allocation *at = nvs_registry_last_deferred(wanted->gpu);
    for (unsigned seen = 0; at != NULL && seen < LOOK_AT && !found; seen++) {
        found = !at->deferred.held && at->deferred.stream == wanted->deferred.stream && at->context == wanted->context &&
                at->charged_bytes == wanted->charged_bytes && at->length >= bytes;
        if (!found)
            at = at->deferred.earlier;
    }
    if (found) {
        *key = at->key;
        *event = at->deferred.event;
        nvs_registry_undefer(at);
    }
    nvs_registry_unlock();
    return found;
}

size_t nvs_allocation_hold_deferred(uint32_t gpu, nvs_allocation **out, size_t room)
{
    size_t count = 0;
    nvs_registry_lock();
    for (nvs_allocation *at = nvs_registry_first_deferred(gpu); at != NULL && count < room; at = at->deferred.later) {
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
    nvs_registry_remove(held);
    nvs_registry_unlock();
    return alive;
}
