"""The settings of a node, each declared once: kind of value with unit and bounds, default, scope and help.

A field of `Settings` made with `setting` is a setting of the node, and perhaps of single GPUs; profile.py has the
settings of programs.  From the declaration follow the flag of `nvshare-coordinator`, the variable `NVSHARE_NAME`, the
key of the file (daemon/settings_file.py), the sample file, `nvshare-ctl set` (cli/ctl_settings.py), what lasts over a
restart (daemon/control/live_settings.py), the engine's event `Set` (engine/operator_commands.py), the reference page
and the chart's schema (tests/docs/generated.py).  Other fields are the engine's own figures.

The records never change.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from nvshare.coordinator.kinds import (
    DURATION,
    DURATION_OR_NEVER,
    FLAG,
    OWN_OR_COMMON,
    POLICY,
    PORT,
    QUANTUM,
    SHARE,
    SIZE,
    TEXT,
    Setting,
    choice_of,
    setting,
    whole,
)
from nvshare.coordinator.model.profile import I32_MAX, I32_MIN, MAX_WEIGHT, PROFILE
from nvshare.scheduler_policies.api import JobClass

MILLISECOND_NS: Final = 1_000_000
SECOND_NS: Final = 1_000_000_000
RECONNECT_NS: Final = SECOND_NS
"""After a start, clients of an earlier coordinator connect again within this time."""


class Sharing(enum.IntEnum):
    """The operator's choice: one lease at a time, all clients whose memory fits, or what the policy plans."""

    EXCLUSIVE = 0
    CONCURRENT = 1
    AUTO = 2


class OverdueAction(enum.Enum):
    """The action on a client whose drain passes its deadline.  Other clients run beside it in any case."""

    NOTHING = "nothing"
    DEMOTE = "demote"
    """It runs only when nobody else waits, until it gives a lease back in time."""
    KILL = "kill"


# --- the settings of a node -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """All settings of the node, in the order of the reference page and the sample file."""

    policy: str = setting(
        POLICY, "auto", by_gpu=True, chapter="How a GPU is shared",
        live=True,
        help="Chooses which programs run now and which is next: `auto`, `round_robin`, `priority`, `fair_share`, "
        "`least_attained`, `edf`, or a plug-in",
    )  # fmt: skip
    quantum_ns: int | None = setting(
        QUANTUM, None, by_gpu=True, live=True, sample='"auto"',
        help="How long a turn lasts while others wait; `auto` follows the measured cost of switching",
    )  # fmt: skip
    switch_share: float = setting(
        SHARE, 0.05, by_gpu=True, live=True, reply="share",
        help='With `quantum = "auto"`: the share of time that switching may cost',
        done="switching may cost {value} on {gpus}",
    )  # fmt: skip
    longest_wait_ns: int = setting(
        DURATION, 5 * SECOND_NS,
        help='With `quantum = "auto"`: the turns of the others last no longer together, unless switching would then '
        "cost more than a fifth of the time. Moves of memory come on top. Read at the start",
    )  # fmt: skip
    sharing: Sharing = setting(  # noqa: RUF009 (a field)
        choice_of("auto", "exclusive", "concurrent", choice=Sharing), Sharing.AUTO, by_gpu=True, live=True,
        help="`auto`: as the policy plans; `exclusive`: one lease at a time; `concurrent`: all programs at once while "
        "their memory fits together, in turns otherwise",
    )  # fmt: skip
    mps: str = setting(
        choice_of("off", "same_user"), "off",
        help="`same_user`: the programs of one user run as clients of MPS; a fault of one ends the others. Read "
        "at the start",
    )  # fmt: skip
    share_by: str = setting(
        choice_of("user", "program"), "user", chapter="Users",
        help="Time is divided between users first (`user`), or between programs (`program`)",
    )  # fmt: skip
    max_priority: int = setting(
        whole(I32_MIN, I32_MAX), 0, reloaded=True,
        help="Highest `--priority` of a user's program. Root and the coordinator's own user have no bound; Kubernetes "
        "slots have annotations",
    )  # fmt: skip
    max_weight: int = setting(whole(1, MAX_WEIGHT), 100, reloaded=True, help="The same for `--weight`")
    hide_other_users: bool = setting(
        FLAG, False, reloaded=True,
        help="`nvshare-ctl` hides names and process ids of other users' programs, except from root and the "
        "coordinator's own user; the web page and the metrics show no names at all",
    )  # fmt: skip
    capacity_bytes: int | None = setting(
        SIZE, None, by_gpu=True, sample='"20GiB"', default_text="most of the card's",
        chapter="Memory; the defaults are the card's own, and 3/4 of the machine's or container's",
        help="Bytes of each GPU that all programs together may have resident. By default all but what CUDA contexts "
        "need: 1/32 of the card's memory, from 512 MiB to 3 GiB. A context needs 0.2 to 0.6 GiB. An integrated GPU, "
        "whose memory is the machine's: 3/4 of that",
    )  # fmt: skip
    host_budget_bytes: int | None = setting(
        SIZE, None, live=True, sample='"64GiB"', default_text="3/4 of memory",
        help="Pinned host memory for evicted data of all programs; by default 3/4 of the machine's or container's",
        done="host budget is {value}; {used} of it are in use{more}",
    )  # fmt: skip
    drain_deadline_ns: int = setting(
        DURATION, 10 * SECOND_NS, chapter="Slow and lost programs",
        help="How long submitted work may take to end after a revoke. What takes longer than a quantum is a debt of "
        "the program's user or slot: while others want the GPU, its programs wait until each other user could have "
        "had as much time. A stopped program has about a second instead, while `overdue_action` is `nothing`",
    )  # fmt: skip
    overdue_action: OverdueAction = setting(  # noqa: RUF009 (a field)
        choice_of("nothing", "demote", "kill", choice=OverdueAction), OverdueAction.NOTHING,
        help="What happens to a program that exceeds `drain_deadline`: `nothing`, `demote`, `kill`. The others "
        "continue in any case, if memory allows",
    )  # fmt: skip
    pacing_budget_ns: int = setting(
        DURATION_OR_NEVER, 10 * MILLISECOND_NS,
        help="GPU time that a program may have submitted and unfinished. A program alone on its GPU is bounded "
        "loosely; 0: every program is bounded loosely, at 10 ms",
    )  # fmt: skip
    idle_release_ns: int = setting(
        DURATION_OR_NEVER, 2 * MILLISECOND_NS,
        help="An idle holder returns the lease after this time while others wait, and a gang member after eight times "
        "this; 0: never",
    )  # fmt: skip
    park_after_ns: int = setting(
        DURATION_OR_NEVER, 0, live=True,
        help="A program in mode `swap` that has not used its GPUs for this time leaves them altogether, contexts "
        "included, and comes back at its next call; 0: never. A program's own time (`--park-after`) comes first, "
        "then that of its class, if it has one. Needs NVIDIA's driver 570",
    )  # fmt: skip
    park_after_interactive_ns: int | None = setting(
        OWN_OR_COMMON, None, live=True,
        help="`park_after` of programs of class interactive; `common`: the value of `park_after`",
    )  # fmt: skip
    park_after_best_effort_ns: int | None = setting(
        OWN_OR_COMMON, None, live=True, help="The same for programs of class best-effort"
    )  # fmt: skip
    rebalance: bool = setting(
        FLAG, False, live=True, in_chart=False,
        help="A program in mode `swap` whose GPU is busy with others moves to an idle one of the same model, when it "
        "would lose more of the next minute than the move takes. Needs what `park_after` needs, and driver 580",
    )  # fmt: skip
    recovery_ns: int = setting(
        DURATION, 5 * SECOND_NS, help="After a restart: the longest wait for the earlier holder while it runs"
    )
    hello_timeout_ns: int = setting(
        DURATION, 10 * SECOND_NS, chapter="Connections", help="A connection that sends nothing for so long is closed"
    )
    max_clients: int = setting(
        whole(1, 65_536),
        1024,
        help="Connected programs",
    )
    max_messages_per_s: int = setting(
        whole(100), 20_000,
        help="Messages of all programs of one user or slot; beyond that, the connections that send the most are closed",
    )  # fmt: skip
    metrics_port: int | None = setting(
        PORT, None, sample="9400", in_chart=False, help="Port of the Prometheus metrics over HTTP",
        chapter="Metrics for Prometheus; without a port there are none",
    )  # fmt: skip
    metrics_address: str = setting(
        TEXT,
        "127.0.0.1",
        in_chart=False,
        help="Address of the metrics",
    )
    metrics_tls_dir: str | None = setting(
        TEXT, None, sample='"/etc/nvshare/tls"', in_chart=False,
        help="Directory with `tls.crt` and `tls.key`: metrics over HTTPS; a renewed certificate is used at once",
    )  # fmt: skip
    web_port: int | None = setting(
        PORT, None, sample="9401", in_chart=False,
        chapter="The web page on 127.0.0.1; whoever has the token of the file may change settings there",
        help="Port of the web page, on 127.0.0.1; 0 chooses one. Needs the extra `web`. Read at the start",
    )  # fmt: skip
    web_token_file: str | None = setting(
        TEXT, None, sample='"/etc/nvshare/web-token"', in_chart=False,
        help="File with the token that lets the web page change programs; without it the page only shows",
    )  # fmt: skip
    notify_command: str | None = setting(
        TEXT, None, sample='"logger \\"$NVSHARE_EVENT_TEXT\\""', in_chart=False, chapter="Notifications",
        help="A command for /bin/sh, run as the coordinator's user when a GPU is free, a program has started or ended, "
        "lacks room or has it again, is refused memory or does not end its turn, or the policy changes. It gets "
        "NVSHARE_EVENT_TEXT (a sentence), NVSHARE_EVENT_KIND, _NAME, _GPU and _JSON. Read at the start",
    )  # fmt: skip
    usage_dir: str | None = setting(
        TEXT, None, sample='"/var/lib/nvshare"', in_chart=False, default_text="the runtime directory",
        chapter="The use of GPUs by hour, for nvshare-ctl usage",
        help="Directory of its files, at most 25 MiB. The runtime directory keeps them until the machine restarts. "
        "Read at the start",
    )  # fmt: skip
    log_level: str = setting(
        choice_of("debug", "info", "warning", "error"), "info", chapter="Messages",
        help="`debug`, `info`, `warning`, `error`",
    )  # fmt: skip
    gpu: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """UUID -> the fields in which this GPU differs, and their values."""

    # --- the engine's own ---
    quantum_min_ns: int = 20 * MILLISECOND_NS
    quantum_max_ns: int = 60 * SECOND_NS
    """Bounds of the automatic quantum."""
    silent_ns: int = SECOND_NS
    """A member without a turn that reports no progress for this time leaves the running set."""
    move_deadline_ns: int = 30 * SECOND_NS
    """After this time the next client is granted with the memory that is there."""
    move_stall_ns: int = 5 * SECOND_NS
    """A client that moves nothing for this time is not waited for."""
    host_fair_times: int = 8
    """An owner may have at most this many times what is left for others; 0: there are no others."""
    check_invariants: bool = False
    """Checks all invariants after each event, O(clients): for tests.  Otherwise a cheap subset."""
    event_log_length: int = 4096

    def park_after_of_ns(self, job_class: JobClass) -> int:
        """Idleness after which programs of a class are parked, unless they have their own time; 0: never."""
        own = {
            JobClass.INTERACTIVE: self.park_after_interactive_ns,
            JobClass.BEST_EFFORT: self.park_after_best_effort_ns,
        }.get(job_class)
        return self.park_after_ns if own is None else own

    @property
    def parks(self) -> bool:
        """Programs of some class may be parked by themselves."""
        return bool(self.park_after_ns or self.park_after_interactive_ns or self.park_after_best_effort_ns)

    @property
    def users_first(self) -> bool:
        """Time is divided between users and slots, then between the programs of each."""
        return self.share_by == "user"


def declared(record: type) -> dict[str, Setting]:
    """The settings of a record by their names, which have no units."""
    found = {}
    for each in fields(record):
        if "setting" in each.metadata:
            name = each.name.removesuffix("_ns").removesuffix("_bytes")
            made: Setting = each.metadata["setting"]
            found[name] = replace(made, name=name, field=each.name, reply=made.reply or each.name)
    return found


_ACTS: Final = (
    Setting(name="paused", field="paused", kind=replace(FLAG, shown=lambda flag: "yes"), default=False),
    Setting(name="parked", field="parked", kind=FLAG, default=False),
    Setting(name="moved_to", field="moved_to", kind=TEXT, default=""),
)
"""What an operator does to a program, besides its profile."""

CONFIGURED: Final = declared(Settings)
"""By the key of the file."""
SETTINGS: Final = CONFIGURED | {
    each.name: replace(each, of_client=True, reply=each.reply or each.field)
    for each in (*PROFILE.values(), *_ACTS)
    if each.name
}
