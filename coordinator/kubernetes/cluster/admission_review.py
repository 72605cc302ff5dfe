"""Answers to Kubernetes' AdmissionReviews about pods: the patch of a pod, warnings, refusals.

A pod's own LD_PRELOAD would replace the device plugin's, so `/mutate` appends the hook to it.  `/mutate` also writes
the settings of annotations and priority classes into the environment that the hook reads.  `/validate` checks
annotations.

Invariants:
- The patch changes only containers that request a slot, and in them only three variables.
- The patch is idempotent: a patched pod needs no patch.
- `/mutate` never refuses.  `/validate` refuses only under `enforce`, and on an update only mistakes that the update
  adds: a pod with an older mistake can still lose its finalizers and end.
- No content of a pod raises.  A body that is no review raises `MalformedReviewError`.

Non-goals: sockets, TLS, metrics.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from nvshare.coordinator.kubernetes.cluster.annotations import (
    CONTAINER_LISTS,
    HOOK_IN_CONTAINER,
    Rules,
    asks_for,
    findings,
    pod_asks_for,
    settings_of,
)

API_VERSION: Final = "admission.k8s.io/v1"
MAX_WARNINGS: Final = 8
MAX_WARNING_CHARACTERS: Final = 240
_HOOK_FILE: Final = "libnvshare_hook.so"


class MalformedReviewError(ValueError):
    """The body is no AdmissionReview v1; the text names the field."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The operator's settings for answers."""

    rules: Rules = field(default_factory=Rules)
    hook_path: str = HOOK_IN_CONTAINER
    enforce: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The response as JSON, and its outcome for metrics."""

    body: dict[str, Any]
    outcome: str
    """One of patched, unchanged, warned, refused."""


Patch = list[dict[str, Any]]


def mutate(review: object, settings: Settings) -> Answer:
    """The answer of `/mutate`.  Raises MalformedReviewError."""
    uid, request = _request(review)
    pod = _pod(request)
    if pod is None or request.get("operation") != "CREATE":
        return Answer(_review({"uid": uid, "allowed": True}), "unchanged")
    patch, warnings = pod_patch(pod, settings)
    response: dict[str, Any] = {"uid": uid, "allowed": True}
    if patch:
        encoded = base64.b64encode(json.dumps(patch).encode()).decode()
        response |= {"patchType": "JSONPatch", "patch": encoded}
    _warn(response, warnings)
    return Answer(_review(response), "patched" if patch else "warned" if warnings else "unchanged")


def validate(review: object, settings: Settings) -> Answer:
    """The answer of `/validate`.  Raises MalformedReviewError."""
    uid, request = _request(review)
    pod = _pod(request)
    if pod is None or request.get("operation") not in ("CREATE", "UPDATE"):
        return Answer(_review({"uid": uid, "allowed": True}), "unchanged")
    wrong = findings(pod, settings.rules) if pod_asks_for(pod, settings.rules.resource) else []
    old = request.get("oldObject")
    if isinstance(old, Mapping):
        known = set(findings(old, settings.rules))
        wrong = [finding for finding in wrong if finding not in known]
    texts = [finding.text for finding in wrong]
    response: dict[str, Any] = {"uid": uid, "allowed": not (texts and settings.enforce)}
    if not response["allowed"]:
        message = "; ".join(texts[:MAX_WARNINGS])
        response["status"] = {"code": 422, "reason": "Invalid", "message": message}
        return Answer(_review(response), "refused")
    _warn(response, [f"{text}; it is ignored" for text in texts])
    return Answer(_review(response), "warned" if texts else "unchanged")


def pod_patch(pod: Mapping[str, Any], settings: Settings) -> tuple[Patch, list[str]]:
    """The JSON patch that the pod needs, and warnings about variables that cannot be patched."""
    patch: Patch = []
    warnings: list[str] = []
    spec = pod.get("spec")
    for kind in CONTAINER_LISTS:
        containers = spec.get(kind) if isinstance(spec, Mapping) else None
        for index, container in enumerate(containers if isinstance(containers, list) else ()):
            if isinstance(container, Mapping) and asks_for(container, settings.rules.resource):
                wanted = _variables(pod, container, settings)
                patch += _container_patch(f"/spec/{kind}/{index}", container, wanted, warnings)
    return patch, warnings


def merged_preload(value: str, hook: str) -> str:
    """`value` with the hook appended; unchanged if it names a hook already.

    The hook comes last because sanitizer runtimes must come first.  Spaces and colons separate entries.
    """
    entries = re.split("[ :]", value)
    if any(entry == hook or entry.rpartition("/")[2] == _HOOK_FILE for entry in entries):
        return value
    return f"{value}:{hook}" if value else hook


def _variables(pod: Mapping[str, Any], container: Mapping[str, Any], settings: Settings) -> dict[str, str]:
    """The variables that the container must have; LD_PRELOAD only if the container sets it itself."""
    chosen = settings_of(pod, str(container.get("name")), settings.rules)
    wanted: dict[str, str] = {}
    own = _effective(container, "LD_PRELOAD")
    if own is not None:
        wanted["LD_PRELOAD"] = merged_preload(_value(own[1]), settings.hook_path)
    settings_by_name = {
        "NVSHARE_PRIORITY": None if chosen.priority is None else str(chosen.priority),
        "NVSHARE_CLASS": chosen.job_class,
        "NVSHARE_SHARE_REQUEST": chosen.share_request,
        "NVSHARE_SHARE_LIMIT": chosen.share_limit,
        "NVSHARE_MEMORY_LIMIT": chosen.memory_limit_text,
    }
    return wanted | {name: value for name, value in settings_by_name.items() if value is not None}


def _container_patch(
    path: str, container: Mapping[str, Any], wanted: Mapping[str, str], warnings: list[str]
) -> Iterator[dict[str, Any]]:
    has_list = isinstance(container.get("env"), list)
    for name, value in wanted.items():
        own = _effective(container, name)
        if own is None:
            entry = {"name": name, "value": value}
            if has_list:
                yield {"op": "add", "path": f"{path}/env/-", "value": entry}
            else:
                yield {"op": "add", "path": f"{path}/env", "value": [entry]}
                has_list = True
        elif own[1].get("valueFrom") is not None:
            warnings.append(
                f"{path[1:].replace('/', '.')}.env[{name}]: comes from valueFrom and is left alone"
                + ("; the GPU is shared without the hook" if name == "LD_PRELOAD" else "")
            )
        elif _value(own[1]) != value:
            yield {"op": "add", "path": f"{path}/env/{own[0]}/value", "value": value}


def _effective(container: Mapping[str, Any], name: str) -> tuple[int, Mapping[str, Any]] | None:
    """Index and entry of the variable; the last entry of a name counts."""
    entries = container.get("env")
    found = None
    for index, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, Mapping) and entry.get("name") == name:
            found = (index, entry)
    return found


def _value(entry: Mapping[str, Any]) -> str:
    value = entry.get("value")
    return value if isinstance(value, str) else ""


def _request(review: object) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(review, Mapping) or review.get("kind") != "AdmissionReview":
        raise MalformedReviewError("kind: not an AdmissionReview")
    if review.get("apiVersion") != API_VERSION:
        raise MalformedReviewError(f"apiVersion: only {API_VERSION} is served")
    request = review.get("request")
    if not isinstance(request, Mapping):
        raise MalformedReviewError("request: missing")
    uid = request.get("uid")
    if not isinstance(uid, str) or not 0 < len(uid) <= 128:
        raise MalformedReviewError("request.uid: missing")
    return uid, request


def _pod(request: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kind = request.get("kind")
    pod = request.get("object")
    if (
        not isinstance(kind, Mapping)
        or (kind.get("group"), kind.get("kind")) != ("", "Pod")
        or request.get("subResource")
    ):
        return None
    return pod if isinstance(pod, Mapping) else None


def _review(response: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response}


def _warn(response: dict[str, Any], warnings: list[str]) -> None:
    """API servers cut what is long; so the first ones are kept whole."""
    if warnings:
        shown = [f"nvshare: {text}"[:MAX_WARNING_CHARACTERS] for text in warnings[:MAX_WARNINGS]]
        response["warnings"] = shown
