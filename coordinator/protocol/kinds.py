"""Values of fields of the messages."""

from __future__ import annotations

import enum


class MemoryMode(enum.IntEnum):
    """The hook's handling of device allocations."""

    DEVICE = 0
    MANAGED = 1
    SWAP = 2


class ReleaseReason(enum.IntEnum):
    """Reason of a release."""

    REVOKED = 0
    IDLE = 1


class Rejection(enum.IntEnum):
    """Reason of a rejection; the message's text names the remedy."""

    PROTOCOL_VERSION = 1
    UNKNOWN_GPU = 2
    UNKNOWN_MESSAGE = 3
    MALFORMED = 4
    TOO_MANY_CLIENTS = 5
    NOT_ALLOWED = 6
    OUT_OF_MEMORY = 7
    FORBIDDEN_GPU = 8
