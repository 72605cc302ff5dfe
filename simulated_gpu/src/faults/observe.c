/* The observer of this process. */
#include "faults/observe.h"

#include <stdlib.h>
#include <string.h>

static const nvs_sim_observer *_Atomic current_observer;
static _Atomic uint32_t calls; /* the number of the newest call; relaxed, as it orders nothing */
static _Thread_local uint32_t call_number;

SIM_EXPORT void nvs_sim_observe(const nvs_sim_observer *observer)
{
    atomic_store_explicit(&current_observer, observer, memory_order_release); /* pairs with nvs_sim_current_observer */
}

const nvs_sim_observer *nvs_sim_current_observer(void)
{
    /* Acquire: pairs with the release in nvs_sim_observe; the observer is filled in. */
    return atomic_load_explicit(&current_observer, memory_order_acquire);
}

void nvs_sim_observe_call(const char *function)
{
    const nvs_sim_observer *observer = nvs_sim_current_observer();
    if (observer == NULL)
        return;
    call_number = atomic_fetch_add_explicit(&calls, 1, memory_order_relaxed) + 1;
    observer->call(function, call_number);
}

uint32_t nvs_sim_call_number(void) { return call_number; }

/* Queued work, and a tool's record of it, may outlive the module. */
const char *nvs_sim_lasting_name(const char *name)
{
    static struct name {
        struct name *next;
        char text[];
    } *all;
    for (struct name *one = all; one != NULL; one = one->next)
        if (strcmp(one->text, name) == 0)
            return one->text;
    struct name *copy = malloc(sizeof *copy + strlen(name) + 1);
    if (copy == NULL)
        return "";
    memcpy(copy->text, name, strlen(name) + 1);
    copy->next = all;
    all = copy;
    return copy->text;
}
