/* See messages.h. */
#include "coord/messages.h"

#include "base/config.h"
#include "base/log.h"
#include "base/process.h"
#include "base/system.h"
#include "coord/lease.h"
#include "coord/mailbox.h"
#include "coord/memory/budget.h"
#include "coord/memory/moves.h"
#include "coord/memory/report.h"
#include "coord/progress.h"
#include "coord/protocol/wire.gen.h"
#include "coord/waiting/notice.h"
#include "gate/gate.h"
#include "memory/memory.h"

#define LOG_AGAIN_NS 60000000000u
#define LONGEST_STANDBY_NS 20000000u

uint64_t nvs_awake_until_ns;

static void move_memory(const nvs_move_order *order)
{
    const nvs_agent_gpu *mine = &nvs_agent_gpus[order->gpu];
    if (!nvs_lease_open(&mine->lease) && !nvs_agent_ending(mine)) {
        nvs_moves_begin(order);
        return;
    }
    nvs_report_memory(order->gpu, nvs_now_ns()); /* memory moves only while the program has no lease */
    NVS_LINK_SEND(move_progress, (uint8_t)order->gpu, order->order_id, 0, 0, true, CUDA_ERROR_NOT_PERMITTED);
}

static void settle(uint32_t gpu)
{
    atomic_store_explicit(&nvs_mail[gpu].settled, 1, memory_order_release); /* pairs with nvs_agent_attach */
    nvs_futex_wake(&nvs_mail[gpu].settled, INT32_MAX);
}

static void on_lost(void)
{
    atomic_store_explicit(&nvs_agent_connected, 0, memory_order_relaxed); /* a hint */
    nvs_agent_unanswered_count = 0;
    nvs_moves_abandon();
    nvs_budget_lost();
    nvs_notice_lost();
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++) {
        nvs_progress_lost(gpu);
        nvs_agent_set_rate(gpu, NVS_DUTY_ALWAYS);
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_DISCONNECTED});
    }
}

static void on_connected(void)
{
    nvs_agent_unanswered_count = 0;
    for (uint32_t gpu = 0; gpu < NVS_MAX_GPUS; gpu++)
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_CONNECTED});
}

static void on_rejected(const nvs_rejected *rejected)
{
    static uint64_t log_again_ns;
    uint64_t now = nvs_now_ns();
    const bool forbidden = rejected->code == NVS_REJECTION_FORBIDDEN_GPU;
    if ((forbidden || rejected->code == NVS_REJECTION_UNKNOWN_GPU) && nvs_agent_unanswered_count > 0) {
        uint32_t gpu = nvs_agent_unanswered[0]; /* the coordinator answers in order */
        nvs_agent_answered(gpu);
        nvs_log(NVS_LOG_WARNING, forbidden ? "GPU %u is refused, its work never runs: %s" : "GPU %u is not shared: %s", gpu, rejected->text);
        if (forbidden) {
            nvs_memory_set_limits(gpu, 0, 1, false);
            nvs_memory_set_refusal(rejected->text);
        }
        nvs_agent_event(gpu, &(nvs_lease_event){.kind = NVS_LEASE_ON_NOT_MANAGED, .flag = forbidden});
        settle(gpu);
        return;
    }
    if (rejected->code == NVS_REJECTION_UNKNOWN_MESSAGE && nvs_budget_rejected())
        return;
    if (rejected->code == NVS_REJECTION_OUT_OF_MEMORY)
        nvs_memory_set_refusal(rejected->text);
    if (now >= log_again_ns || !rejected->final) {
        nvs_log(rejected->final || rejected->code == NVS_REJECTION_NOT_ALLOWED ? NVS_LOG_WARNING : NVS_LOG_INFO, "the coordinator refuses (%u): %s", rejected->code,
                rejected->text);
        log_again_ns = rejected->final ? now + LOG_AGAIN_NS : log_again_ns;
    }
    if (rejected->final)
        nvs_link_refused();
}

static void on_settings(const nvs_gpu_settings *settings)
{
    uint32_t gpu = settings->gpu;
    nvs_agent_answered(gpu);
    atomic_store_explicit(&nvs_ledgers[gpu].quota.limit_of_slot, settings->limit_of_slot, memory_order_relaxed); /* see memory/quota.h */
    nvs_memory_set_limits(gpu, settings->memory_limit_bytes, settings->capacity_bytes, settings->reserve);
    nvs_memory_prepare_host(gpu, settings->prepare_host_bytes);
    nvs_memory_set_room(gpu, settings->room_bytes);
    atomic_store_explicit(&nvs_mail[gpu].ask_pins, settings->ask_pins, memory_order_relaxed); /* see its declaration */
    nvs_agent_gpus[gpu].connection.settled = true;
    nvs_agent_set_pacing(gpu, settings->pacing_budget_ns, settings->idle_release_ns);
    settle(gpu);
}

static void on_reserved(const nvs_memory_reserved *answer)
{
    atomic_store_explicit(&nvs_ledgers[answer->gpu].quota.limited, answer->by_limit, memory_order_relaxed); /* see memory/quota.h */
    nvs_memory_set_reserved(answer->gpu, answer->bytes);
    if (answer->sequence == nvs_agent_gpus[answer->gpu].connection.reserve)
        nvs_question_answer(&nvs_mail[answer->gpu].reserve, answer->sequence, answer->bytes);
}

static void on_pins(const nvs_pins_reserved *answer)
{
    if (answer->sequence == nvs_agent_gpus[answer->gpu].connection.pins)
        nvs_question_answer(&nvs_mail[answer->gpu].pins, answer->sequence, answer->bytes);
}

static void on_standby(const nvs_standby *standby)
{
    uint64_t within = standby->within_ns < LONGEST_STANDBY_NS ? standby->within_ns : LONGEST_STANDBY_NS;
    nvs_awake_until_ns = nvs_now_ns() + within;
    if (nvs_agent_gpus[standby->gpu].lease.state == NVS_LEASE_ASKED) /* else the program's own lease is about to end */
        nvs_gate_alert(standby->gpu, nvs_awake_until_ns);
}

static void on_frame(const uint8_t *frame, size_t size)
{
    nvs_to_client in;
    nvs_wire_result result = size > NVS_MAX_FRAME_BYTES ? NVS_WIRE_MALFORMED : nvs_decode_to_client(frame, size, &in);
    if (result == NVS_WIRE_UNKNOWN) {
        NVS_LOG_ONCE(NVS_LOG_INFO, "message of unknown type %u; the coordinator is newer", in.type);
        return;
    }
    uint32_t about = result == NVS_WIRE_OK ? nvs_to_client_gpu(&in) : UINT32_MAX;
    if (about != UINT32_MAX && (about >= NVS_MAX_GPUS || !nvs_agent_gpus[about].known))
        result = NVS_WIRE_MALFORMED;
    if (result != NVS_WIRE_OK) {
        NVS_LOG_ONCE(NVS_LOG_WARNING, "the coordinator sent something malformed; connecting again");
        nvs_link_fail();
        return;
    }
    nvs_lease_event event = {0};
    switch (in.type) {
    case NVS_TYPE_WELCOME:
        atomic_store_explicit(&nvs_agent_connected, 1, memory_order_relaxed); /* a hint */
        nvs_budget_connected();
        nvs_log(NVS_LOG_INFO, "client %llu of %s", (unsigned long long)in.welcome.client_id, nvs_config.socket);
        return;
    case NVS_TYPE_REJECTED: on_rejected(&in.rejected); return;
    case NVS_TYPE_GPU_SETTINGS: on_settings(&in.gpu_settings); return;
    case NVS_TYPE_MEMORY_RESERVED: on_reserved(&in.memory_reserved); return;
    case NVS_TYPE_PINS_RESERVED: on_pins(&in.pins_reserved); return;
    case NVS_TYPE_EVICT:
        move_memory(&(nvs_move_order){.gpu = in.evict.gpu, .out = true, .order_id = in.evict.order_id, .bytes = in.evict.bytes,
                                      .credit_bytes = UINT64_MAX});
        return;
    case NVS_TYPE_RESTORE:
        move_memory(&(nvs_move_order){.gpu = in.restore.gpu, .order_id = in.restore.order_id, .bytes = in.restore.bytes,
                                      .credit_bytes = in.restore.credit_bytes});
        return;
    case NVS_TYPE_MOVE_CREDIT:
        nvs_moves_credit(in.move_credit.gpu, in.move_credit.order_id, in.move_credit.credit_bytes);
        return;
    case NVS_TYPE_HOST_RESERVED: nvs_budget_answer(&in.host_reserved); return;
    case NVS_TYPE_GRANT:
        event = (nvs_lease_event){.kind = NVS_LEASE_ON_GRANT, .lease_id = in.grant.lease_id, .number = in.grant.waiters};
        nvs_awake_until_ns = 0;
        nvs_agent_event(in.grant.gpu, &event);
        return;
    case NVS_TYPE_ALLOT:
        nvs_progress_allot(&in.allot);
        nvs_agent_set_rate(in.allot.gpu, in.allot.rate);
        return;
    case NVS_TYPE_WAIT_EXPLAINED: nvs_notice_explained(&in.wait_explained); return;
    case NVS_TYPE_STANDBY: on_standby(&in.standby); return;
    case NVS_TYPE_REVOKE:
        event = (nvs_lease_event){
            .kind = NVS_LEASE_ON_REVOKE, .lease_id = in.revoke.lease_id, .number = in.revoke.drain_deadline_ns};
        nvs_agent_event(in.revoke.gpu, &event);
        if (nvs_agent_ending(&nvs_agent_gpus[in.revoke.gpu]))
            nvs_agent_continue_end(in.revoke.gpu);
        return;
    case NVS_TYPE_WAITERS:
        event = (nvs_lease_event){
            .kind = NVS_LEASE_ON_WAITERS, .lease_id = in.waiters.lease_id, .number = in.waiters.waiters};
        nvs_agent_event(in.waiters.gpu, &event);
        return;
    default: return;
    }
}

const nvs_link_handlers nvs_message_handlers = {on_connected, on_lost, on_frame};
