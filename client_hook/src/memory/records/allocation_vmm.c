/* The registry's part for the application's own virtual memory management: see allocation.h. */
#include "memory/records/allocation.h"
#include "memory/records/registry.h"

nvs_allocation *nvs_allocation_pin_handle(uint64_t handle)
{
    nvs_registry_lock();
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_HANDLE, handle);
    if (found != NULL)
        found->vmm.mappings++;
    nvs_registry_unlock();
    return found;
}

nvs_allocation *nvs_allocation_map(nvs_allocation *mapping, nvs_allocation *pinned)
{
    nvs_registry_lock();
    mapping->vmm.handle = pinned;
    nvs_allocation *stale = nvs_registry_insert(mapping);
    nvs_registry_unlock();
    return stale;
}

nvs_allocation *nvs_allocation_unpin_handle(nvs_allocation *pinned)
{
    nvs_registry_lock();
    bool last = --pinned->vmm.mappings == 0 && pinned->vmm.references == 0;
    if (last)
        nvs_registry_remove(pinned);
    nvs_registry_unlock();
    return last ? pinned : NULL;
}

nvs_allocation *nvs_allocation_pin_mapping(uint64_t address, uint64_t length, nvs_allocation *copy)
{
    nvs_allocation *handle = NULL;
    nvs_registry_lock();
    const nvs_allocation *at = nvs_registry_find(NVS_SPACE_ADDRESS, address);
    if (at == NULL)
        at = nvs_registry_next(NVS_SPACE_ADDRESS, address);
    while (at != NULL && (at->key <= address || at->key - address < length)) {
        if (at->kind == NVS_MEMORY_MAPPING && at->backend.chunked) {
            handle = at->vmm.handle;
            handle->vmm.mappings++;
            *copy = *at;
            break;
        }
        at = nvs_registry_next(NVS_SPACE_ADDRESS, at->key + 1);
    }
    nvs_registry_unlock();
    return handle;
}

bool nvs_allocation_overlaps(nvs_space space, uint64_t address, uint64_t length)
{
    nvs_registry_lock();
    bool found = nvs_registry_find(space, address) != NULL;
    if (!found) {
        const nvs_allocation *next = nvs_registry_next(space, address);
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
        nvs_allocation *at = nvs_registry_next(NVS_SPACE_ADDRESS, address);
        while (at != NULL && at->kind != NVS_MEMORY_MAPPING && at->key - address < length)
            at = nvs_registry_next(NVS_SPACE_ADDRESS, at->key + 1);
        if (at == NULL || at->key - address >= length)
            break;
        nvs_registry_remove(at);
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
            nvs_registry_end_mapping(taken, &list);
        } else {
            nvs_allocation *stale = nvs_registry_insert(taken);
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
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_HANDLE, handle);
    bool counted = found != NULL && found->vmm.references != 0;
    if (counted && --found->vmm.references == 0 && found->vmm.mappings == 0) {
        nvs_registry_remove(found);
        *last = found;
    }
    nvs_registry_unlock();
    return counted;
}

void nvs_allocation_retain_handle(uint64_t handle)
{
    nvs_registry_lock();
    nvs_allocation *found = nvs_registry_find(NVS_SPACE_HANDLE, handle);
    if (found != NULL)
        found->vmm.references++;
    nvs_registry_unlock();
}
