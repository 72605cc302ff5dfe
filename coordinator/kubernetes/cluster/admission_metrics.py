"""The webhook's metrics.

Non-goals: serving them.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class Metrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reviews = Counter(
            "nvshare_admission_reviews",
            "Reviews answered",
            ["endpoint", "outcome"],
            registry=self.registry,
        )
        self.seconds = Histogram(
            "nvshare_admission_seconds",
            "From a review's first byte to its answer",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3),
            registry=self.registry,
        )
        self.dropped = Counter(
            "nvshare_admission_dropped_connections",
            "Connections closed for exceeding a bound or failing TLS",
            ["reason"],
            registry=self.registry,
        )
        self.failed_reloads = Counter(
            "nvshare_admission_failed_certificate_reloads",
            "Certificates that could not be loaded",
            registry=self.registry,
        )
