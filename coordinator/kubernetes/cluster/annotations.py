"""Pod annotations and priority classes: names, allowed values, precedence; the result is the profile of a slot.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from nvshare.coordinator.kinds import SIZE, TEXT, Kind, whole
from nvshare.coordinator.model import profile
from nvshare.coordinator.model.profile import PROFILE
from nvshare.coordinator.units import parse_part, parse_size

PREFIX: Final = "nvshare.com/"
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
QUALIFIED: Final = re.compile(r"[a-z0-9.-]{1,253}/[A-Za-z0-9._-]{1,63}")
"""Name of a resource, or kind of a CDI device."""
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z")
# Unambiguous units only: a bare G is 10^9 in Kubernetes and 2^30 for CUDA users.  The digit counts keep sizes < 1 EiB.
_SIZE: Final = re.compile(
    r"([1-9][0-9]{6,17}|[1-9][0-9]{0,8}([.][0-9]{1,3})?([KMG]iB?|[KMG]B)|[1-9][0-9]{0,5}([.][0-9]{1,3})?(TiB?|TB))\Z"
)


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if not pattern.match(text):
            raise ValueError(text)
        return text

    return parse


_GANG: Final = replace(
    TEXT,
    parse=_matching(_LABEL),
    sample="a name of at most 63 small letters, digits and dashes, the same in all pods of the gang",
)
_MEMORY_LIMIT: Final = replace(
    SIZE,
    parse=lambda text: parse_size(_hook_size(_matching(_SIZE)(text))),
    sample="a size such as 8Gi, 512Mi, 8GB or at least 1000000 bytes",
)


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


def _known_class(name: str) -> str:
    if name not in CLASSES:
        raise ValueError(f"{_shown(name)} is none of {', '.join(NEWER_CLASSES)}")
    return name


class ClassDefaults(BaseModel):
    """Settings that a priority class of the cluster implies; a number alone is the priority."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", populate_by_name=True)

    priority: int | None = Field(default=None, ge=-999_999_999, le=999_999_999)
    weight: int | None = Field(default=None, ge=1, le=MAX_WEIGHT)
    job_class: Annotated[str, AfterValidator(_known_class)] | None = Field(default=None, validation_alias="class")

    @model_validator(mode="before")
    @classmethod
    def _number(cls, entry: object) -> object:
        return {"priority": entry} if isinstance(entry, int) else entry


_PRIORITY_CLASSES: Final = TypeAdapter(dict[str, ClassDefaults])


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


def settings_of(pod: Mapping[str, Any], container: str, rules: Rules) -> dict[str, str]:
    """The profile of this container's slot, without the invalid annotations."""
    return read_pod(pod, container, rules)[0]


def read_pod(pod: Mapping[str, Any], container: str, rules: Rules) -> tuple[dict[str, str], list[Finding]]:
    """The profile of this container's slot, and its invalid annotations, which have no effect."""
    reading = _Reading(pod, rules)
    found = reading.words(container)
    defaults = rules.priority_classes.get(_text(_mapping(pod.get("spec")).get("priorityClassName")), ClassDefaults())
    name = found.get("class") or defaults.job_class
    priority = defaults.priority
    if name is not None:
        if "class" in found or priority is None:
            priority = CLASSES[name][1]
        found["class"] = CLASSES[name][0]
    for word, value in (("priority", priority), ("weight", defaults.weight)):
        if value is not None:
            found.setdefault(word, str(value))
    if "gang" in found:  # unique on the node
        found["gang"] = f"{namespace_of(pod) or 'default'}/{found['gang']}"
    return found, reading.rejected


def allowed_classes(rules: Rules) -> list[str]:
    """Classes whose priority lies within the operator's bounds, so that a class cannot evade them."""
    return [name for name, (_, priority) in CLASSES.items() if rules.priority_min <= priority <= rules.priority_max]


def findings(pod: Mapping[str, Any], rules: Rules) -> list[Finding]:
    """Every invalid nvshare annotation of the pod, sorted by name."""
    reading = _Reading(pod, rules)
    reading.words("")
    containers = [name for name, _ in containers_of(pod)]
    for key in sorted(reading.ours):
        if key.startswith(MEMORY_LIMIT + "."):
            reading.read("memory_limit", key)
            container = key.removeprefix(MEMORY_LIMIT + ".")
            if container not in containers:
                there = ", ".join(containers) or "none"
                reading.reject(key, f"the pod has no container {_shown(container)}; its containers are {there}")
        elif key not in (known := {row.annotation for row in profile.of_slots()}):
            short = {name.removeprefix(PREFIX) for name in known}
            near = difflib.get_close_matches(key.removeprefix(PREFIX), short, 1)
            hint = f"did you mean {PREFIX}{near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            reading.reject(key, f"there is no such annotation; {hint}")
    return sorted(reading.rejected, key=lambda finding: finding.annotation)


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
        self._kinds = _kinds(rules)

    def reject(self, key: str, allowed: str) -> None:
        self.rejected.append(Finding(key, self.ours[key], allowed))

    def words(self, container: str) -> dict[str, str]:
        """The valid annotations, by the words of a profile."""
        found = {row.word: self.read(row.word, row.annotation) for row in profile.of_slots()}
        own = self.read("memory_limit", f"{MEMORY_LIMIT}.{container}") if container else None
        found |= {"memory_limit": own or found["memory_limit"]}
        request, most = found["share_request"], found["share_limit"]
        if request is not None and most is not None and parse_part(request) > parse_part(most):
            key, limit = PROFILE["share_request"].annotation, PROFILE["share_limit"].annotation
            self.reject(key, f"it is above {limit}, {most}")
            del found["share_request"]
        return {word: text for word, text in found.items() if text is not None}

    def read(self, word: str, key: str) -> str | None:
        """The annotation's text as in a profile; None without a valid one."""
        kind = self._kinds.get(word, PROFILE[word].kind)
        if (text := self.ours.get(key)) is None:
            return None
        try:
            value = kind.read(text)
        except ValueError:
            self.reject(key, f"write {kind.forms}")
            return None
        return value if isinstance(value, str) else str(value) if word == "memory_limit" else text


def _kinds(rules: Rules) -> dict[str, Kind]:
    """Kinds of values that are narrower in a cluster than elsewhere."""
    allowed = allowed_classes(rules)
    newer = ", ".join(name for name in NEWER_CLASSES if name in allowed)
    return {
        "priority": whole(rules.priority_min, rules.priority_max),
        "weight": whole(1, MAX_WEIGHT),
        "class": replace(
            TEXT,
            parse=_matching(re.compile(rf"({'|'.join(allowed)})\Z")),
            sample=f"one of {newer}" if newer else "nothing: no class is within the priority range",
        ),
        "gang": _GANG,
        "memory_limit": _MEMORY_LIMIT,
    }


def rules_from(
    *, resource: str = GPU_RESOURCE, priority_range: str = "-1000:1000", priority_classes: object = None
) -> Rules:
    """Rules from command line options and a parsed JSON file.  Raises RulesError."""
    low, separator, high = priority_range.partition(":")
    if not (separator and _WHOLE.match(low) and _WHOLE.match(high) and int(low) <= int(high)):
        raise RulesError(f"--priority-range: {_shown(priority_range)}: write MIN:MAX, such as -1000:1000")
    if not QUALIFIED.fullmatch(resource):
        raise RulesError(f"--resource: {_shown(resource)}: write DOMAIN/NAME, such as {GPU_RESOURCE}")
    try:
        classes = _PRIORITY_CLASSES.validate_python({} if priority_classes is None else priority_classes)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ": ".join(("--priority-classes", ".".join(map(str, first["loc"])))).removesuffix(": ")
        raise RulesError(f"{where}: {first['msg'].removeprefix('Value error, ')}") from None
    return Rules(resource=resource, priority_min=int(low), priority_max=int(high), priority_classes=classes)


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
