/* See quota.h. */
#include "memory/quota.h"

#include "base/config.h"
#include "base/hot.h"
#include "base/log.h"

#include <stdatomic.h>
#include <string.h>

static const uint64_t RESERVE_STEP = UINT64_C(64) << 20; /* at most */

NVS_FORK_STATE nvs_ledger nvs_ledgers[NVS_MAX_GPUS];

static uint64_t load(_Atomic uint64_t *value)
{
    return atomic_load_explicit(value, memory_order_relaxed); /* see memory/quota.h */
}

static uint64_t smaller_set(uint64_t a, uint64_t b) /* 0 means not set */
{
    return a == 0 || (b != 0 && b < a) ? b : a;
}

static uint64_t limit_of(nvs_ledger *of)
{
    uint64_t limit = load(&of->quota.limit);
    return limit != 0 ? limit : nvs_config.memory_limit;
}

/* The size of the virtual card, 0 when it is the real one. */
static uint64_t card_of(nvs_ledger *of)
{
    return smaller_set(limit_of(of), load(&of->quota.capacity));
}

/* The most that may be allocated; 0: no limit.  Memory beyond the capacity, less what others have pinned, could never be resident at once. */
static uint64_t ceiling_of(nvs_ledger *of)
{
    return smaller_set(card_of(of), load(&of->quota.room));
}

/* Raises `charged` if the limit allows it.  The new total comes out. */
static bool charge(uint32_t gpu, uint64_t bytes, uint64_t *total)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t limit = ceiling_of(of);
    uint64_t now = load(&of->charged);
    do {
        if (bytes > UINT64_MAX - now || (limit != 0 && now + bytes > limit))
            return false;
        /* See memory/quota.h. */
    } while (!atomic_compare_exchange_weak_explicit(&of->charged, &now, now + bytes, memory_order_seq_cst,
                                                    memory_order_relaxed));
    *total = now + bytes;
    return true;
}

/* Updates `freely` after a change of its inputs. */
static void learn_freely(nvs_ledger *of)
{
    /* Relaxed: see memory/quota.h. */
    uint64_t most = ceiling_of(of);
    if (atomic_load_explicit(&of->quota.reserve, memory_order_relaxed) && (most == 0 || load(&of->quota.reserved) < most))
        most = load(&of->quota.reserved);
    else if (most == 0)
        most = UINT64_MAX / 2;
    atomic_store_explicit(&of->freely, most, memory_order_relaxed);
}

uint64_t nvs_memory_capacity(uint32_t gpu)
{
    return load(&nvs_ledgers[gpu].quota.capacity);
}

uint64_t nvs_memory_ceiling(uint32_t gpu)
{
    return ceiling_of(&nvs_ledgers[gpu]);
}

/* A reservation takes room from other programs, also where it is unused: a step is at most half of what the program has, and a 64th of the GPU. */
static uint64_t reserve_step(nvs_ledger *of, uint64_t has)
{
    const uint64_t capacity = load(&of->quota.capacity), most = smaller_set(RESERVE_STEP, capacity / 64);
    return nvs_memory_grains(has / 2 < most ? has / 2 : most);
}

/* Requests growth beyond the reservation from the coordinator, in steps, so that requests are rare. */
static bool reserved_up_to(uint32_t gpu, uint64_t total)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* Relaxed: see memory/quota.h. */
    if (!atomic_load_explicit(&of->quota.reserve, memory_order_relaxed) || total <= load(&of->quota.reserved))
        return true;
    uint64_t limit = ceiling_of(of);
    const uint64_t more = reserve_step(of, total);
    uint64_t step = total > UINT64_MAX - more ? total : total + more;
    if (limit != 0 && step > limit)
        step = limit;
    nvs_status answer = nvs_coordinator.reserve(gpu, step > total ? step : total, 0);
    if (answer == NVS_REFUSED && step > total)
        answer = nvs_coordinator.reserve(gpu, total, 0); /* the last bytes below the capacity */
    return answer != NVS_REFUSED;
}

/* `resident_bytes` of a chunked backend add to the charges for other memory. */
bool nvs_memory_may_grow(uint32_t gpu, uint64_t resident_bytes)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t charged = load(&of->charged), chunked = load(&of->chunked);
    return reserved_up_to(gpu, resident_bytes + (charged > chunked ? charged - chunked : 0));
}

bool nvs_memory_spare(uint32_t gpu, uint64_t resident_bytes, bool *less)
{
    static uint64_t seen[NVS_MAX_GPUS]; /* of the agent thread */
    nvs_ledger *of = &nvs_ledgers[gpu];
    const uint64_t charged = load(&of->charged), used = resident_bytes > charged ? resident_bytes : charged, reserved = load(&of->quota.reserved);
    const uint64_t enough = used == seen[gpu] ? used : used + reserve_step(of, used);
    seen[gpu] = used;
    *less = enough < reserved;
    if (*less)
        nvs_memory_set_reserved(gpu, enough);
    return used < reserved;
}

bool nvs_memory_make_room(uint32_t gpu, uint64_t lacking_bytes)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    const uint64_t reserved = load(&of->quota.reserved);
    /* Relaxed: see memory/quota.h.  A refusal leaves no reservation. */
    return atomic_load_explicit(&of->quota.reserve, memory_order_relaxed) && reserved > 0 &&
           nvs_coordinator.reserve(gpu, reserved, lacking_bytes) == NVS_OK;
}

bool nvs_quota_charge(uint32_t gpu, uint64_t bytes, bool ask)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t total;
    if (!ask)
        return charge(gpu, bytes, &total);
    /* Relaxed: see memory/quota.h. */
    atomic_fetch_add_explicit(&of->unanswered, bytes, memory_order_relaxed);
    const bool charged = charge(gpu, bytes, &total), granted = charged && reserved_up_to(gpu, total);
    if (charged && !granted)
        nvs_ledger_uncharge(of, bytes);
    atomic_fetch_sub_explicit(&of->unanswered, bytes, memory_order_relaxed);
    if (!granted)
        nvs_memory_changed(gpu); /* a report of this moment may have left out too much */
    return granted;
}

void nvs_memory_charge_again(uint32_t gpu, uint64_t charged_bytes)
{
    atomic_fetch_add_explicit(&nvs_ledgers[gpu].charged, charged_bytes, memory_order_seq_cst); /* see memory/quota.h */
    nvs_memory_changed(gpu);
}

void nvs_memory_set_limits(uint32_t gpu, uint64_t limit_bytes, uint64_t capacity_bytes, uint64_t room_bytes, bool reserve)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* Relaxed: see memory/quota.h. */
    atomic_store_explicit(&of->quota.limit, limit_bytes, memory_order_relaxed);
    atomic_store_explicit(&of->quota.capacity, capacity_bytes, memory_order_relaxed);
    atomic_store_explicit(&of->quota.room, room_bytes, memory_order_relaxed);
    atomic_store_explicit(&of->quota.reserve, reserve, memory_order_relaxed);
    learn_freely(of);
}

void nvs_memory_set_reserved(uint32_t gpu, uint64_t reserved_bytes)
{
    atomic_store_explicit(&nvs_ledgers[gpu].quota.reserved, reserved_bytes, memory_order_relaxed); /* see memory/quota.h */
    learn_freely(&nvs_ledgers[gpu]);
}

void nvs_quota_virtual_info(uint32_t gpu, bool movable, uint64_t *free_bytes, uint64_t *total_bytes)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    uint64_t card = card_of(of);
    if (card == 0)
        return;
    uint64_t total = smaller_set(card, *total_bytes), charged = load(&of->charged);
    const uint64_t limit = limit_of(of), slot = load(&of->quota.slot);
    uint64_t most = smaller_set(total, load(&of->quota.room));
    if (slot != 0 && (slot >= limit || limit - slot < most))
        most = slot < limit ? limit - slot : 0;
    uint64_t left = charged < most ? most - charged : 0;
    /* Managed memory of other programs can be evicted; memory in mode `device` cannot. */
    if (!movable && *free_bytes < left)
        left = *free_bytes;
    *free_bytes = left;
    *total_bytes = total;
}

static unsigned long long whole_mib(uint64_t bytes)
{
    return (unsigned long long)((bytes >> 20) + ((bytes & ((1u << 20) - 1)) != 0));
}

/* True: the limit is the reason. */
static bool say_limited(uint32_t gpu, uint64_t bytes)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    /* Relaxed: see memory/quota.h. */
    const uint64_t set = atomic_load_explicit(&of->quota.limit, memory_order_relaxed), limit = set != 0 ? set : nvs_config.memory_limit;
    const uint64_t charged = atomic_load_explicit(&of->charged, memory_order_relaxed);
    const bool beyond = charged > limit || bytes > limit - charged;
    if (limit == 0 || (!beyond && !atomic_load_explicit(&of->quota.limited, memory_order_relaxed)))
        return false;
    if (atomic_load_explicit(&of->quota.limit_of_slot, memory_order_relaxed))
        NVS_LOG_ONCE(NVS_LOG_WARNING, "%llu MiB more on GPU %u are out of memory: the limit of this container is %llu MiB, for all of its programs "
                     "together (in a pod: by its claim, or its annotation nvshare.com/memory-limit)",
                     whole_mib(bytes), gpu, whole_mib(limit));
    else if (limit == nvs_config.memory_limit)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "%llu MiB more on GPU %u are out of memory: the limit of this program is %llu MiB, from NVSHARE_MEMORY_LIMIT "
                     "(nvshare-run --gpu-memory-limit); to change it now: nvshare-ctl limit %s --memory SIZE",
                     whole_mib(bytes), gpu, whole_mib(limit), nvs_config.name);
    else
        NVS_LOG_ONCE(NVS_LOG_WARNING, "%llu MiB more on GPU %u are out of memory: the limit of this program is %llu MiB, set in the coordinator; to "
                     "change it: nvshare-ctl limit %s --memory SIZE", whole_mib(bytes), gpu, whole_mib(limit), nvs_config.name);
    return true;
}

static char refusal[256];
enum { NO_REFUSAL, REFUSAL, REFUSAL_TAKEN };
static _Atomic uint32_t refusal_state; /* the text is written by the agent before REFUSAL, released, and not changed after it */

void nvs_memory_set_refusal(const char *text)
{
    if (atomic_load_explicit(&refusal_state, memory_order_relaxed) != NO_REFUSAL) /* only this thread changes that */
        return;
    strncpy(refusal, text, sizeof refusal - 1);
    atomic_store_explicit(&refusal_state, REFUSAL, memory_order_release); /* pairs with the exchange below */
}

const char *nvs_memory_take_refusal(void)
{
    uint32_t seen = REFUSAL;
    return atomic_compare_exchange_strong_explicit(&refusal_state, &seen, REFUSAL_TAKEN, memory_order_acquire, memory_order_relaxed) ? refusal
                                                                                                                                     : NULL;
}

void nvs_memory_log_refused(uint32_t gpu, uint64_t bytes, bool full)
{
    nvs_ledger *of = &nvs_ledgers[gpu];
    if (say_limited(gpu, bytes))
        return;
    const char *text = nvs_memory_take_refusal();
    const uint64_t most = ceiling_of(of), charged = load(&of->charged);
    if (text != NULL)
        nvs_log(NVS_LOG_WARNING, "%llu MiB more on GPU %u are out of memory: %s", whole_mib(bytes), gpu, text);
    else if (most != 0 && (charged > most || bytes > most - charged))
        NVS_LOG_ONCE(NVS_LOG_WARNING, "%llu MiB more on GPU %u are out of memory: this program has %llu MiB of the %llu MiB that %s", whole_mib(bytes),
                     gpu, whole_mib(charged), whole_mib(most), most < card_of(of) ? "other programs' memory that cannot move leaves on the card "
                     "(`nvshare-ctl memory` shows whose it is)" : "one program can have on the card");
    else if (full)
        NVS_LOG_ONCE(NVS_LOG_WARNING, "%llu MiB more on GPU %u are out of memory: the card is full, and this program has %llu MiB of it; `nvidia-smi` "
                     "and `nvshare-ctl memory` show who has the rest, and `nvshare-run --memory swap` needs no free memory",
                     whole_mib(bytes), gpu, whole_mib(charged));
}

NVS_FORK_CODE void nvs_quota_after_fork(void)
{
    static const nvs_ledger none;
    nvs_pools_go(NVS_POOLS_FAST, NVS_POOLS_UNKNOWN);
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) { /* one thread: any order will do */
        if (memcmp(&nvs_ledgers[gpu], &none, sizeof none) == 0)
            continue;
        atomic_store_explicit(&nvs_ledgers[gpu].charged, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].unanswered, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].freely, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].to_report, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].movable, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].chunked, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].evicted, 0, memory_order_relaxed);
        atomic_store_explicit(&nvs_ledgers[gpu].quota.reserved, 0, memory_order_relaxed);
    }
}
