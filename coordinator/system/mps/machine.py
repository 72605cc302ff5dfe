"""The states of one MPS control daemon, without I/O: each method takes an event and returns the actions that follow.

    idle -> starting -> ready -> idle      a program asks; ten seconds after the last program the daemon is stopped
    ready -> waiting -> starting           the daemon died while programs need it; also after a failed start
    draining -> idle                       an earlier coordinator told the daemon to quit; it ends with its last client

Invariants:
- The daemon serves one user.  A program of another user is refused while the first one has programs.
- Every program that asks gets exactly one answer: at once, or when the daemon has started or failed.
- A daemon with clients is told to quit only when the coordinator ends, and then ends with its last client.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

SECOND_NS: Final = 1_000_000_000
LINGER_NS: Final = 10 * SECOND_NS
"""The daemon stays for this time after its last program; then, and after each such time, its clients are counted."""
BACKOFF_NS: Final = SECOND_NS
MAX_BACKOFF_NS: Final = 60 * SECOND_NS
STEADY_NS: Final = 60 * SECOND_NS
"""A daemon that served for this time is restarted with the shortest backoff."""
MAX_PROGRAMS: Final = 48
"""Client processes of one GPU that every driver since Volta allows; newer ones allow 60."""


class Phase(enum.Enum):
    IDLE = "idle"
    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Start:
    """Start the daemon as this user; `started` or `failed` follows."""

    user: int


@dataclass(frozen=True, slots=True)
class CountClients:
    """Ask the daemon for its client processes; `counted` follows."""


@dataclass(frozen=True, slots=True)
class Quit:
    """Tell the daemon to quit.  `wait`: until it has ended, then `ended` follows; else it ends with its last client."""

    wait: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """A program joins, or gets the reason and the remedy of the refusal."""

    program: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """One line for the log, and one trace event."""

    state: str
    text: str
    is_problem: bool = False


Action = Start | CountClients | Quit | Answer | Note


@dataclass(slots=True)
class Machine:
    """One daemon.  `owner`: the coordinator's user; with `all_users` the daemon serves any one user at a time."""

    owner: int
    all_users: bool
    phase: Phase = Phase.IDLE
    user: int | None = None
    problem: str | None = None
    """Reason of the latest failure, until a start succeeds."""
    programs: set[int] = field(default_factory=set)
    deadline_ns: int | None = None
    """When `tick` is due."""
    _asking: dict[int, int] = field(default_factory=dict)
    """User of each program without an answer."""
    _backoff_ns: int = BACKOFF_NS
    _ready_since_ns: int = 0

    # --- programs ---------------------------------------------------------------------------------------------------

    def asks(self, program: int, user: int) -> list[Action]:
        """A program of `user` asks to join."""
        if (refusal := self._refusal(user)) is not None:
            return [Answer(program, refusal)]
        if self.phase is Phase.READY and user == self.user:
            self.programs.add(program)
            self.deadline_ns = None
            return [Answer(program)]
        self._asking[program] = user
        if self.phase is Phase.READY:  # the earlier user has no programs, but may have other clients
            return [CountClients()]
        return [] if self.phase is Phase.STARTING else self._start(user)

    def left(self, program: int, now_ns: int) -> list[Action]:
        """A program has ended."""
        self._asking.pop(program, None)
        self.programs.discard(program)
        if self.phase is Phase.READY and not self.programs and self.deadline_ns is None:
            self.deadline_ns = now_ns + LINGER_NS
        return []

    # --- the daemon ---------------------------------------------------------------------------------------------------

    def started(self, now_ns: int) -> list[Action]:
        """The daemon and its server run."""
        self.phase, self.problem, self.deadline_ns = Phase.READY, None, None
        self._ready_since_ns = now_ns
        joined = list(self._asking)
        self.programs.update(joined)
        self._asking.clear()
        if not self.programs:
            self.deadline_ns = now_ns + LINGER_NS
        return [Note("ready", f"MPS is ready for user {self.user}"), *(Answer(program) for program in joined)]

    def failed(self, reason: str, now_ns: int) -> list[Action]:
        """The daemon does not start."""
        is_new = reason != self.problem
        self.problem = reason
        refused: list[Action] = [Answer(program, reason) for program in self._asking]
        self._asking.clear()
        self._wait(now_ns)
        note = Note("refused", f"MPS is not available, programs run without it: {reason}", is_problem=True)
        return [*([note] if is_new else []), *refused]

    def died(self, now_ns: int) -> list[Action]:
        """The daemon ended although it was not told to."""
        if self.phase is Phase.DRAINING:
            self._rest()
            return [Note("idle", "the MPS daemon of the earlier coordinator has ended")]
        if now_ns - self._ready_since_ns >= STEADY_NS:
            self._backoff_ns = BACKOFF_NS
        count = len(self.programs)
        self.problem = "the control daemon died; see control.log in the runtime directory's mps/log"
        text = f"the MPS control daemon died; programs that were its clients: {count}; they may fail"
        if count:
            self._wait(now_ns)
        else:
            self._rest()
        return [Note("died", text, is_problem=True), *([] if count else [Quit(wait=True)])]  # ends its servers

    def counted(self, clients: int) -> list[Action]:
        """The daemon has this number of client processes.  `tick` and `asks` request it."""
        if clients == 0:
            return [Quit(wait=True)]
        refusal = f"MPS serves user {self.user}, whose {clients} processes still use it; {_OUTSIDE}"
        refused: list[Action] = [Answer(program, refusal) for program in self._asking]
        self._asking.clear()
        return refused

    def ended(self) -> list[Action]:
        """The daemon has ended as it was told."""
        stopped = [Note("idle", "MPS is stopped")] if self.phase is Phase.READY else []
        self._rest()
        return [*stopped, *(self._start(next(iter(self._asking.values()))) if self._asking else [])]

    def adopted(self, user: int, *, quitting: bool, now_ns: int) -> list[Action]:
        """At the coordinator's start: a daemon of an earlier coordinator runs.  `quitting`: it was told to quit."""
        self.user = user
        if quitting:
            self.phase = Phase.DRAINING
            return [Note("draining", f"the MPS daemon of the earlier coordinator still has clients of user {user}")]
        self.phase, self.deadline_ns, self._ready_since_ns = Phase.READY, now_ns + LINGER_NS, now_ns
        return [Note("ready", f"MPS goes on for user {user}, with the daemon of the earlier coordinator")]

    # --- time ---------------------------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> list[Action]:
        """Call when `deadline_ns` has come."""
        if self.deadline_ns is None or now_ns < self.deadline_ns:
            return []
        self.deadline_ns = None
        if self.phase is Phase.READY and not self.programs:
            self.deadline_ns = now_ns + LINGER_NS
            return [CountClients()]
        if self.phase is Phase.WAITING:
            if self.programs and self.user is not None:
                return self._start(self.user)
            return [Quit(wait=True)]
        return []

    def stop(self) -> list[Action]:
        """The coordinator ends."""
        refused: list[Action] = [Answer(program, f"the coordinator ends; {_OUTSIDE}") for program in self._asking]
        self._asking.clear()
        if self.phase is Phase.DRAINING:
            return refused
        if self.programs and self.phase is Phase.READY:
            text = f"MPS ends with the last of its {len(self.programs)} programs"
            return [*refused, Note("draining", text), Quit(wait=False)]
        return refused if self.programs else [*refused, Quit(wait=True)]

    # --- parts --------------------------------------------------------------------------------------------------------

    def _refusal(self, user: int) -> str | None:
        """Why a program of `user` may not even wait for an answer."""
        if not self.all_users and user != self.owner:
            return (
                f"this coordinator's MPS serves user {self.owner} only, not user {user}; run the coordinator as root "
                f"to serve one user at a time, or {_OUTSIDE}"
            )
        if self.phase is Phase.DRAINING:
            return f"the MPS daemon of an earlier coordinator still has clients; it ends with the last one; {_OUTSIDE}"
        if self.phase is Phase.WAITING:
            return f"{self.problem}; {_OUTSIDE}"
        users = {*self._asking.values(), *([self.user] if self.programs and self.user is not None else [])}
        if users - {user}:
            return (
                f"MPS serves user {min(users - {user})} until that user's last program has left: several users cannot "
                f"share a server; {_OUTSIDE}"
            )
        if len(self.programs) + len(self._asking) >= MAX_PROGRAMS:
            return f"MPS has {MAX_PROGRAMS} programs, its limit; {_OUTSIDE}"
        return None

    def _start(self, user: int) -> list[Action]:
        self.phase, self.user, self.deadline_ns = Phase.STARTING, user, None
        return [Start(user)]

    def _wait(self, now_ns: int) -> None:
        self.phase, self.deadline_ns = Phase.WAITING, now_ns + self._backoff_ns
        self._backoff_ns = min(2 * self._backoff_ns, MAX_BACKOFF_NS)

    def _rest(self) -> None:
        self.phase, self.user, self.deadline_ns = Phase.IDLE, None, None


_OUTSIDE: Final = "the program runs without MPS"
