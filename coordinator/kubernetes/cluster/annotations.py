"""Pod annotations and priority classes: names, allowed values, precedence; the result is a slot's settings.

Invariants:
- An invalid annotation has no effect and becomes a `Finding`, which names the annotation, its value and the allowed
  values.  No content of a pod raises.
- Precedence of the priority: priority annotation, class annotation, the pod's priority class.
- Pods are parsed JSON and may have any shape.

Non-goals: files, sockets, scheduling.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nvshare.coordinator.units import parse_part, parse_size

PREFIX: Final = "nvshare.com/"
PRIORITY: Final = PREFIX + "priority"
WEIGHT: Final = PREFIX + "weight"
CLASS: Final = PREFIX + "class"
SHARE_REQUEST: Final = PREFIX + "share-request"
SHARE_LIMIT: Final = PREFIX + "share-limit"
GANG: Final = PREFIX + "gang"
PARK_AFTER: Final = PREFIX + "park-after"
MEMORY_LIMIT: Final = PREFIX + "memory-limit"
"""Limit of every container of the pod.  The suffix `.CONTAINER` limits one container."""

GPU_RESOURCE: Final = "nvshare.com/gpu"

CLASSES: Final[Mapping[str, tuple[str, int]]] = {
    "interactive": ("interactive", 100),
    "batch": ("batch", 0),
    "best-effort": ("best-effort", -100),
    "production": ("batch", 100),
    "standard": ("batch", 0),
    "opportunistic": ("best-effort", -100),
}
"""Name -> the program's class, and its priority where no priority annotation is set.  The last three are older."""
NEWER_CLASSES: Final = tuple(dict.fromkeys(name for name, _ in CLASSES.values()))

MAX_WEIGHT: Final = 1000
_WHOLE: Final = re.compile(r"(0|-?[1-9][0-9]{0,8})\Z")
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
# Unambiguous units only: a bare G is 10^9 in Kubernetes and 2^30 for CUDA users.  The digit counts keep sizes < 1 EiB.
_SIZE: Final = re.compile(
    r"([1-9][0-9]{6,17}|[1-9][0-9]{0,8}([.][0-9]{1,3})?([KMG]iB?|[KMG]B)|[1-9][0-9]{0,5}([.][0-9]{1,3})?(TiB?|TB))\Z"
)
# At most thousandths, the wire's unit.
_SHARE: Final = re.compile(r"((0|[1-9][0-9]?|100)%|0([.][0-9]{1,3})?|1([.]0{1,3})?)\Z")
_TIME: Final = re.compile(r"(0|[1-9][0-9]{0,4}[sm]|[1-9][0-9]{0,2}h)\Z")
_SIZE_HELP: Final = "a size such as 8Gi, 512Mi, 8GB or at least 1000000 bytes"


@dataclass(frozen=True, slots=True)
class Finding:
    """One invalid annotation."""

    annotation: str
    value: str
    allowed: str

    @property
    def text(self) -> str:
        """The message for the user."""
        return f"metadata.annotations[{self.annotation}]: {_shown(self.value)} is not allowed: {self.allowed}"


@dataclass(frozen=True, slots=True)
class ContainerSettings:
    """Settings of one container's slot.  None: not set."""

    priority: int | None = None
    weight: int | None = None
    job_class: str | None = None
    """One of `NEWER_CLASSES`."""
    share_request: str | None = None
    """As the annotation has it, which the hook reads too."""
    share_limit: str | None = None
    gang: str | None = None
    """Unique on the node: `NAMESPACE/NAME`."""
    memory_limit_bytes: int | None = None
    park_after: str | None = None
    """As the annotation has it, which the hook reads too."""


@dataclass(frozen=True, slots=True)
class ClassDefaults:
    """Settings that a priority class of the cluster implies; `job_class`: a key of `CLASSES`."""

    priority: int | None = None
    weight: int | None = None
    job_class: str | None = None


@dataclass(frozen=True, slots=True)
class Rules:
    """The cluster operator's settings."""

    resource: str = GPU_RESOURCE
    priority_min: int = -1000
    priority_max: int = 1000
    """Bounds of the priority annotation.  Priority classes are not bounded: Kubernetes controls who may use them."""
    priority_classes: Mapping[str, ClassDefaults] = field(default_factory=dict)


class RulesError(ValueError):
    """Invalid rules; the text names the option and the entry."""


def settings_of(pod: Mapping[str, Any], container: str, rules: Rules) -> ContainerSettings:
    """Settings of this container's slot, without the invalid annotations."""
    reading = _Reading(pod, rules)
    defaults = rules.priority_classes.get(_text(_mapping(pod.get("spec")).get("priorityClassName")), ClassDefaults())
    priority, name, weight = reading.priority(), reading.job_class(), reading.weight()
    if priority is None:
        priority = CLASSES[name][1] if name is not None else defaults.priority
    name = name or defaults.job_class
    if priority is None and name is not None:
        priority = CLASSES[name][1]
    request, most = reading.shares()
    gang = reading.gang()
    limit = reading.memory_limit(container)
    return ContainerSettings(
        priority=priority,
        weight=weight if weight is not None else defaults.weight,
        job_class=None if name is None else CLASSES[name][0],
        share_request=request,
        share_limit=most,
        gang=None if gang is None else f"{namespace_of(pod) or 'default'}/{gang}",
        memory_limit_bytes=None if limit is None else parse_size(_hook_size(limit)),
        park_after=reading.park_after(),
    )


def allowed_classes(rules: Rules) -> list[str]:
    """Classes whose priority lies within the operator's bounds, so that a class cannot evade them."""
    return [name for name, (_, priority) in CLASSES.items() if rules.priority_min <= priority <= rules.priority_max]


def findings(pod: Mapping[str, Any], rules: Rules) -> list[Finding]:
    """Every invalid nvshare annotation of the pod, sorted by name."""
    reading = _Reading(pod, rules)
    containers = [name for name, _ in containers_of(pod)]
    for read in (reading.priority, reading.weight, reading.job_class, reading.shares, reading.gang, reading.park_after):
        read()
    for key in sorted(reading.ours):
        if key == MEMORY_LIMIT or key.startswith(MEMORY_LIMIT + "."):
            reading.size(key)
            container = key.removeprefix(MEMORY_LIMIT).removeprefix(".")
            if key != MEMORY_LIMIT and container not in containers:
                known = ", ".join(containers) or "none"
                reading.reject(key, f"the pod has no container {_shown(container)}; its containers are {known}")
        elif key not in _KNOWN:
            short = {name.removeprefix(PREFIX) for name in _KNOWN}
            near = difflib.get_close_matches(key.removeprefix(PREFIX), short, 1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(sorted(_KNOWN))}"
            reading.reject(key, f"there is no such annotation; {hint}")
    return sorted(reading.rejected, key=lambda finding: finding.annotation)


_KNOWN: Final = frozenset({PRIORITY, WEIGHT, CLASS, SHARE_REQUEST, SHARE_LIMIT, GANG, MEMORY_LIMIT, PARK_AFTER})


def containers_of(pod: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Name and object of every container and init container, in the pod's order."""
    spec = _mapping(pod.get("spec"))
    for kind in CONTAINER_LISTS:
        for container in _list(spec.get(kind)):
            if isinstance(container, Mapping):
                yield _text(container.get("name")), container


CONTAINER_LISTS: Final = ("containers", "initContainers")


def asks_for(container: Mapping[str, Any], resource: str) -> bool:
    """Whether the container's limits name the resource.  (Kubernetes rejects requests without limits here.)"""
    return resource in _mapping(_mapping(container.get("resources")).get("limits"))


def pod_asks_for(pod: Mapping[str, Any], resource: str) -> bool:
    """Whether any container of the pod requests a slot."""
    return any(asks_for(container, resource) for _, container in containers_of(pod))


def namespace_of(pod: Mapping[str, Any]) -> str:
    """The pod's namespace; empty if the object has none."""
    return _text(_mapping(pod.get("metadata")).get("namespace"))


def annotations_of(pod: Mapping[str, Any]) -> dict[str, str]:
    """The pod's nvshare annotations."""
    found = _mapping(_mapping(pod.get("metadata")).get("annotations"))
    return {str(key): _text(value) for key, value in found.items() if str(key).startswith(PREFIX)}


class _Reading:
    """Reads a pod's annotations and collects the invalid ones."""

    def __init__(self, pod: Mapping[str, Any], rules: Rules) -> None:
        self.ours = annotations_of(pod)
        self.rejected: list[Finding] = []
        self._rules = rules

    def reject(self, key: str, allowed: str) -> None:
        self.rejected.append(Finding(key, self.ours[key], allowed))

    def priority(self) -> int | None:
        return self._whole(PRIORITY, self._rules.priority_min, self._rules.priority_max)

    def weight(self) -> int | None:
        return self._whole(WEIGHT, 1, MAX_WEIGHT)

    def job_class(self) -> str | None:
        value = self.ours.get(CLASS)
        allowed = allowed_classes(self._rules)
        if value is None or value in allowed:
            return value
        names = ", ".join(name for name in NEWER_CLASSES if name in allowed)
        self.reject(CLASS, f"write one of {names}" if names else "no class is within the priority range")
        return None

    def shares(self) -> tuple[str | None, str | None]:
        """Request and limit; a request above the limit is invalid."""
        request, most = self._share(SHARE_REQUEST, 0.0), self._share(SHARE_LIMIT, 0.001)
        if request is not None and most is not None and parse_part(request) > parse_part(most):
            self.reject(SHARE_REQUEST, f"it is above {SHARE_LIMIT}, {self.ours[SHARE_LIMIT]}")
            request = None
        return request, most

    def _share(self, key: str, least: float) -> str | None:
        value = self.ours.get(key)
        if value is None or (_SHARE.match(value) and parse_part(value) >= least):
            return value
        above = "above 0 and at most 1" if least else "from 0 to 1"
        self.reject(key, f"write a share {above}, such as 0.3 or 30%")
        return None

    def gang(self) -> str | None:
        value = self.ours.get(GANG)
        if value is None or _LABEL.match(value):
            return value
        self.reject(
            GANG, "write a name of at most 63 small letters, digits and dashes, the same in all pods of the gang"
        )
        return None

    def park_after(self) -> str | None:
        value = self.ours.get(PARK_AFTER)
        if value is None or _TIME.match(value):
            return value
        self.reject(PARK_AFTER, "write a time such as 90s, 10m or 2h, or 0 for never")
        return None

    def memory_limit(self, container: str) -> str | None:
        """The container's limit if valid, else the pod's."""
        own = self.size(f"{MEMORY_LIMIT}.{container}")
        return own if own is not None else self.size(MEMORY_LIMIT)

    def size(self, key: str) -> str | None:
        value = self.ours.get(key)
        if value is None or _SIZE.match(value):
            return value
        self.reject(key, f"write {_SIZE_HELP}")
        return None

    def _whole(self, key: str, low: int, high: int) -> int | None:
        value = self.ours.get(key)
        if value is None:
            return None
        if _WHOLE.match(value) and low <= int(value) <= high:
            return int(value)
        self.reject(key, f"write a whole number from {low} to {high}")
        return None


def rules_from(
    *, resource: str = GPU_RESOURCE, priority_range: str = "-1000:1000", priority_classes: object = None
) -> Rules:
    """Rules from command line options and a parsed JSON file.  Raises RulesError."""
    low, separator, high = priority_range.partition(":")
    if not (separator and _WHOLE.match(low) and _WHOLE.match(high) and int(low) <= int(high)):
        raise RulesError(f"--priority-range: {_shown(priority_range)}: write MIN:MAX, such as -1000:1000")
    if not re.fullmatch(r"[a-z0-9.-]{1,253}/[A-Za-z0-9._-]{1,63}", resource):
        raise RulesError(f"--resource: {_shown(resource)}: write DOMAIN/NAME, such as {GPU_RESOURCE}")
    if priority_classes is not None and not isinstance(priority_classes, Mapping):
        raise RulesError('--priority-classes: write an object such as {"production": {"priority": 10}}')
    return Rules(
        resource=resource,
        priority_min=int(low),
        priority_max=int(high),
        priority_classes={str(name): _defaults(str(name), entry) for name, entry in (priority_classes or {}).items()},
    )


def _defaults(name: str, entry: object) -> ClassDefaults:
    if isinstance(entry, int):
        entry = {"priority": entry}
    if not isinstance(entry, Mapping):
        raise RulesError(f"--priority-classes: {name}: write a priority, or an object with priority, weight, class")
    unknown = sorted(set(entry) - {"priority", "weight", "class"})
    if unknown:
        raise RulesError(f"--priority-classes: {name}.{unknown[0]}: no such setting; known are priority, weight, class")
    job_class = entry.get("class")
    if job_class is not None and job_class not in CLASSES:
        raise RulesError(f"--priority-classes: {name}.class: {_shown(job_class)} is none of {', '.join(NEWER_CLASSES)}")
    return ClassDefaults(
        priority=_number(name, "priority", entry, -999_999_999, 999_999_999),
        weight=_number(name, "weight", entry, 1, MAX_WEIGHT),
        job_class=job_class,
    )


def _number(name: str, key: str, entry: Mapping[str, Any], low: int, high: int) -> int | None:
    value = entry.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RulesError(
            f"--priority-classes: {name}.{key}: {_shown(value)}: write a whole number from {low} to {high}"
        )
    return value


def _hook_size(text: str) -> str:
    """Kubernetes' `8Gi` in the hook's notation: `8GiB`."""
    return text + "B" if text.endswith("i") else text


def _shown(value: object) -> str:
    """The value quoted, printable and shortened: users may write anything into an annotation."""
    text = value if isinstance(value, str) else repr(value)
    return ascii(text[:61] + "..." if len(text) > 64 else text).replace("'", '"')


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> Iterable[Any]:
    return value if isinstance(value, list) else ()


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
