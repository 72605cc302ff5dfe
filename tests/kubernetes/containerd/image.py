"""A container image made of one program, as an OCI archive that `ctr images import` reads."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Final

NAME: Final = "docker.io/nvshare/box:1"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_FOLDERS: Final = ("dev", "etc", "opt", "proc", "run", "sys", "tmp", "usr")
_LINKS: Final = ("bin", "lib", "lib64")


def write(file: Path, busybox: Path) -> None:
    """An image that sleeps; with the machine's /usr mounted it has the machine's programs."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        for name in _FOLDERS:
            _add(tar, name, kind=tarfile.DIRTYPE)
        for name in _LINKS:
            _add(tar, name, kind=tarfile.SYMTYPE, link=f"usr/{name}")
        _add(tar, "busybox", busybox.read_bytes())
    content = layer.getvalue()
    config = _json(
        architecture="amd64", os="linux", rootfs={"type": "layers", "diff_ids": [_digest(content)]},
        config={"Entrypoint": ["/busybox", "sleep", "1000000"], "Env": ["PATH=/usr/bin"]},
    )  # fmt: skip
    layers = [_described(_LAYER, content)]
    manifest = _json(schemaVersion=2, mediaType=_MANIFEST, config=_described(_CONFIG, config), layers=layers)
    named = _described(_MANIFEST, manifest) | {"annotations": {"io.containerd.image.name": NAME}}
    with tarfile.open(file, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        _add(tar, "index.json", _json(schemaVersion=2, manifests=[named]))
        for blob in (content, config, manifest):
            _add(tar, "blobs/" + _digest(blob).replace(":", "/"), blob)


def _add(tar: tarfile.TarFile, name: str, content: bytes = b"", kind: bytes = tarfile.REGTYPE, link: str = "") -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode, entry.size, entry.linkname = kind, 0o755, len(content), link
    tar.addfile(entry, io.BytesIO(content))


def _json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


def _digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def _described(media: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media, "digest": _digest(content), "size": len(content)}
