"""A real containerd with runc, of one test's own, and the kubelet's calls to it.

The programs are the machine's, or Debian's packages of them as `.ci/run` unpacks them below build/containerd.  They
need root and cgroups; `unavailable` says why a machine has none.

Invariants: nothing is left of its pods, processes and mounts after `close`, also if containerd was killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from tests.conftest import ROOT
from tests.kubernetes.containerd import image
from tests.kubernetes.containerd.messages import request, response
from tests.waiting import eventually

UNPACKED: Final = ROOT / "build" / "containerd" / "usr"
PROGRAMS: Final = ("containerd", "containerd-shim-runc-v2", "ctr", "runc", "busybox")
CREATED, RUNNING, EXITED = 0, 1, 2
NODE, CONTAINER = 2, 1  # CRI's namespace modes
CALL_S: Final = 120.0
_CONFIGURATION: Final = """
version = 3
root = "{base}/root"
state = "{base}/state"
[grpc]
  address = "{base}/containerd.sock"
[ttrpc]
  address = "{base}/containerd.sock.ttrpc"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  disable_apparmor = true
  enable_cdi = true
  cdi_spec_dirs = ["{base}/cdi"]
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
      BinaryName = "{runc}"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{image}"
[plugins."io.containerd.nri.v1.nri"]
  socket_path = "{base}/nri.sock"
  plugin_path = "{base}/nri/plugins"
  plugin_config_path = "{base}/nri/conf.d"
"""


def program(name: str) -> Path | None:
    """A program that containerd needs; None if it is not here."""
    for folder in (UNPACKED / "bin", UNPACKED / "sbin"):
        if (folder / name).exists():
            return folder / name
    found = shutil.which(name)
    return Path(found) if found else None


def unavailable() -> str:
    """Why no containerd runs here; empty if one may."""
    missing = [name for name in PROGRAMS if program(name) is None]
    if missing:
        return f"{', '.join(missing)} not here; .ci/run unpacks Debian's packages"
    if os.geteuid() != 0:
        return "containerd needs root"
    return ""


@dataclass(frozen=True, slots=True)
class Pod:
    """A sandbox, and the configuration that each of its containers repeats."""

    id: str
    config: Any


class Containerd:
    """One containerd; sockets have to be short, so its directory is below /tmp."""

    def __init__(self) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="nvc-"))
        self.socket = self.base / "containerd.sock"
        self.nri_socket = self.base / "nri.sock"
        self.cdi_dir = self.base / "cdi"
        self.cdi_dir.mkdir()
        runc, busybox = program("runc"), program("busybox")
        assert runc is not None
        assert busybox is not None
        self._configuration = self.base / "config.toml"
        self._configuration.write_text(_CONFIGURATION.format(base=self.base, runc=runc, image=image.NAME))
        self._process: subprocess.Popen[bytes] | None = None
        self._pods: list[str] = []
        self._numbers = itertools.count(1)
        self.start()
        archive = self.base / "box.tar"
        image.write(archive, busybox)
        self._run("ctr", "--address", str(self.socket), "--namespace", "k8s.io", "images", "import", str(archive))

    # --- the process --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Returns when it serves."""
        containerd = program("containerd")
        assert containerd is not None
        folders = {str(found.parent) for name in PROGRAMS if (found := program(name)) is not None}
        with (self.base / "containerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [containerd, "--config", str(self._configuration)], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=os.environ | {"PATH": ":".join([*folders, os.environ.get("PATH", "")])},
            )  # fmt: skip
        eventually(self._answers, f"containerd serves\n{self.log()}")

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with contextlib.suppress(grpc.RpcError):
            return bool(self.call("Version", _timeout_s=1.0).runtime_name)
        return False

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends it; containers run on."""
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        """What it has logged."""
        file = self.base / "containerd.log"
        return file.read_text(errors="replace") if file.exists() else ""

    # --- the kubelet's calls ------------------------------------------------------------------------------------------

    def call(self, method: str, _timeout_s: float = CALL_S, **fields: Any) -> Any:
        """One call of CRI's runtime service.  Raises grpc.RpcError."""
        options = [("grpc.default_authority", "localhost"), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix://{self.socket}", options=options) as channel:
            ask: Any = channel.unary_unary(
                f"/runtime.v1.RuntimeService/{method}",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=response(method).FromString,
            )
            return ask(request(method, **fields), timeout=_timeout_s)

    def pod(self, name: str, annotations: Mapping[str, str] | None = None, *, uid: str = "") -> Pod:
        """A pod of namespace `default`, without a network of its own."""
        namespaces = {"network": NODE, "pid": CONTAINER, "ipc": NODE}
        config = {
            "metadata": {"name": name, "uid": uid or f"uid-{name}", "namespace": "default"},
            "annotations": dict(annotations or {}), "log_directory": str(self.base / "logs"),
            "linux": {"cgroup_parent": "/nvshare-test", "security_context": {"namespace_options": namespaces}},
        }  # fmt: skip
        made = self.call("RunPodSandbox", config=config)
        self._pods.append(made.pod_sandbox_id)
        return Pod(made.pod_sandbox_id, config)

    def create(
        self, pod: Pod, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None, *,
        mounts: Sequence[tuple[str, str]] = (), cdi: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """A container, not yet started; `mounts`: (of the host, of the container), besides /usr.  Returns its id."""
        bound = [
            {"host_path": host, "container_path": inside, "readonly": host == "/usr"}
            for host, inside in (("/usr", "/usr"), *mounts)
        ]
        attempt = next(self._numbers)  # two containers of a pod may have the same name, as after a restart
        log = f"{pod.id[:12]}-{name}-{attempt}.log"
        config = {
            "metadata": {"name": name, "attempt": attempt}, "image": {"image": image.NAME}, "command": list(command),
            "envs": [{"key": key, "value": value.encode()} for key, value in (environment or {}).items()],
            "mounts": bound, "CDI_devices": [{"name": each} for each in cdi], "linux": {},
            "log_path": log,
            "labels": {
                "io.kubernetes.pod.name": pod.config["metadata"]["name"],
                "io.kubernetes.pod.namespace": "default",
                "io.kubernetes.pod.uid": pod.config["metadata"]["uid"],
                "io.kubernetes.container.name": name,
            },
        }  # fmt: skip
        made = self.call("CreateContainer", pod_sandbox_id=pod.id, config=config, sandbox_config=pod.config)
        (self.base / "output").mkdir(exist_ok=True)
        (self.base / "output" / made.container_id).symlink_to(self.base / "logs" / log)
        return str(made.container_id)

    def run(self, pod: Pod, name: str, command: Sequence[str], *arguments: Any, **options: Any) -> str:
        """A container that runs; `create` has the rest."""
        container = self.create(pod, name, command, *arguments, **options)
        self.call("StartContainer", container_id=container)
        return container

    def state(self, container: str) -> int:
        """CREATED, RUNNING, EXITED."""
        return int(self.call("ContainerStatus", container_id=container).status.state)

    def finish(self, container: str) -> tuple[int, str]:
        """Waits for the end of a container: its exit code, and what it wrote."""
        eventually(lambda: self.state(container) == EXITED, f"the container ends\n{self.output(container)}")
        status = self.call("ContainerStatus", container_id=container).status
        return int(status.exit_code), self.output(container)

    def output(self, container: str) -> str:
        """What it has written so far."""
        file = self.base / "output" / container
        lines = file.read_text(errors="replace").splitlines() if file.exists() else []
        return "".join(line.split(" ", 3)[3] + "\n" for line in lines)  # time, stream, F or P, text

    def remove(self, container: str) -> None:
        """Stops and removes a container, as the kubelet does before it restarts one."""
        self.call("StopContainer", container_id=container, timeout=0)
        self.call("RemoveContainer", container_id=container)

    def remove_pod(self, pod: Pod) -> None:
        """Stops and removes a pod with its containers."""
        self._pods.remove(pod.id)
        self.call("StopPodSandbox", pod_sandbox_id=pod.id)
        self.call("RemovePodSandbox", pod_sandbox_id=pod.id)

    # --- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Ends its pods, itself and what is left."""
        with contextlib.suppress(grpc.RpcError):
            for pod in self._pods:
                self.call("StopPodSandbox", pod_sandbox_id=pod)
                self.call("RemovePodSandbox", pod_sandbox_id=pod)
        self.stop(signal.SIGKILL)
        for process in self._left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with open("/proc/self/mounts") as mounts:  # noqa: PTH123 - no file of ours
            places = [line.split()[1] for line in mounts if line.split()[1].startswith(f"{self.base}/")]
        for place in reversed(places):
            subprocess.run(["umount", "-l", place], check=False, capture_output=True)
        shutil.rmtree(self.base, ignore_errors=True)

    def _left(self) -> Iterator[int]:
        """Shims, which outlive containerd."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    if str(self.socket).encode() in words:
                        yield int(entry.name)

    def _run(self, name: str, *words: str) -> None:
        found = program(name)
        done = subprocess.run([str(found), *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name} {words}: {done.stderr}\n{self.log()}"
