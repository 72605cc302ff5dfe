"""A server's TLS certificate, reloaded when its files change.

Invariant: a certificate that cannot be loaded changes nothing; the previous one stays in use.

Non-goals: connections.
"""

from __future__ import annotations

import logging
import ssl
import threading
from pathlib import Path

log = logging.getLogger("nvshare")


class CertificateError(Exception):
    """No usable certificate; the text names the directory."""


class Certificate:
    """`tls.crt` and `tls.key` of a directory, the mount of a kubernetes.io/tls secret.

    Each connection reads both files: that is cheap beside a handshake, and no file watch is needed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: object = None
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()

    def context(self) -> ssl.SSLContext:
        """TLS context of the newest usable certificate.  Raises CertificateError if there was none yet."""
        with self._lock:
            try:
                content: object = [(self._directory / name).read_bytes() for name in ("tls.crt", "tls.key")]
            except OSError as error:
                content = str(error)
            if content != self._seen or self._context is None:
                self._seen = content  # also when loading fails: the next attempt is after the next change
                self._load(content)
            assert self._context is not None
            return self._context

    def _load(self, content: object) -> None:
        try:
            _check_read(content)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_cert_chain(self._directory / "tls.crt", self._directory / "tls.key")
        except (OSError, CertificateError) as error:  # ssl.SSLError is an OSError
            text = f"{self._directory}: no usable tls.crt and tls.key: {error}"
            if self._context is None:
                raise CertificateError(text) from None
            log.error("%s; the previous certificate stays in use", text)  # noqa: TRY400 - the text suffices
        else:
            self._context = context
            log.info("certificate loaded from %s", self._directory)


def _check_read(content: object) -> None:
    if isinstance(content, str):
        raise CertificateError(content)
