"""A real node of a real control plane: scheduler, kubelet, containerd and runc, all of one's own.

The programs are those of the folder NVSHARE_TEST_NODE: kubelet, kube-scheduler, containerd, containerd-shim-runc-v2,
ctr, runc.  It takes root, and /var/lib/kubelet/device-plugins, which is the one directory that a kubelet cannot be told
to have elsewhere; so only one runs at a time, and none where a kubelet runs already.

Containers use the host's network, and an image that is made here: a root with the libraries that the programs need, and
the simulated driver, as the container runtime of a GPU node would bring the real one.

Invariants: everything that is started is gone afterwards; every wait has a bound.

Non-goals: the parts of the product.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.kubernetes.real.control_plane import ControlPlane, Json, free_port, program
from tests.waiting import eventually

NODE_PROGRAMS: Final = "NVSHARE_TEST_NODE"
NEEDED: Final = ("kubelet", "kube-scheduler", "containerd", "containerd-shim-runc-v2", "ctr", "runc")
DEVICE_PLUGINS: Final = Path("/var/lib/kubelet/device-plugins")
NODE_NAME: Final = "node-1"
IMAGE: Final = "localhost/app:1"
_PAUSE: Final = "localhost/pause:1"
_PAUSE_SOURCE: Final = "#include <unistd.h>\nint main(void) { for (;;) pause(); }\n"
DRIVER_IN_IMAGE: Final = "/opt/driver"


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Also under pytest-xdist."""
    with (Path(tempfile.gettempdir()) / "nvshare-kubelet.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def obstacle() -> str | None:
    """Why there can be no real node here; None: nothing is in the way."""
    missing = [name for name in NEEDED if program(NODE_PROGRAMS, name) is None]
    if missing:
        return f"{NODE_PROGRAMS} names no folder with {', '.join(missing)}; see docs/reference/kubernetes-tested.md"
    if os.geteuid() != 0:
        return "a kubelet needs root"
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.connect(str(DEVICE_PLUGINS / "kubelet.sock"))  # one that has ended leaves the file
        return f"a kubelet runs here: {DEVICE_PLUGINS}/kubelet.sock"
    return None


@dataclass
class RealNode:
    """Operations of tests on the node."""

    plane: ControlPlane
    directory: Path
    shared: Path
    """Folder that containers find at /gpu."""

    @property
    def pod_resources(self) -> Path:
        return self.directory / "kubelet" / "pod-resources" / "kubelet.sock"

    def start_kubelet(self) -> None:
        """Returns when the node is ready."""
        kubelet = program(NODE_PROGRAMS, "kubelet")
        self.plane.start(
            "kubelet",
            [
                str(kubelet), f"--config={self.directory / 'kubelet.json'}", f"--root-dir={self.directory / 'kubelet'}",
                f"--kubeconfig={self.directory / 'kubeconfig'}", f"--hostname-override={NODE_NAME}",
                f"--cert-dir={self.directory / 'pki'}",
            ],
            environment={**os.environ, "PATH": _path()},
        )  # fmt: skip
        eventually(lambda: self._ready(), "the node is ready", 120)

    def _ready(self) -> bool:
        assert self.plane.processes["kubelet"].poll() is None, self.plane.log("kubelet")
        reply = self.plane.admin.request("GET", f"/api/v1/nodes/{NODE_NAME}")
        conditions = reply.body["status"].get("conditions", ()) if reply.status == 200 else ()
        if not any(each["type"] == "Ready" and each["status"] == "True" for each in conditions):
            return False
        if reply.body["spec"].get("taints"):  # a controller takes it away in a cluster
            change = {"spec": {"taints": None}}
            self.plane.admin.patch(f"/api/v1/nodes/{NODE_NAME}", change)
            return False
        return True

    def allocatable(self, resource: str) -> int:
        """As `kubectl describe node` shows it."""
        status = self.plane.admin.get(f"/api/v1/nodes/{NODE_NAME}")["status"]
        return int(status["allocatable"].get(resource, "0"))

    def run(self, name: str, command: Sequence[str], limits: dict[str, str], **more: Any) -> None:
        """A pod; the cluster's scheduler chooses the node."""
        container: Json = {"name": "main", "image": IMAGE, "imagePullPolicy": "Never", "command": list(command)}
        container["resources"] = {"limits": limits}
        container["volumeMounts"] = [{"name": "gpu", "mountPath": "/gpu"}]
        spec: Json = {
            "containers": [container], "restartPolicy": "Never", "hostNetwork": True, "dnsPolicy": "Default",
            "automountServiceAccountToken": False, "terminationGracePeriodSeconds": 1,
            "volumes": [{"name": "gpu", "hostPath": {"path": str(self.shared)}}],
        }  # fmt: skip
        container.update(more.pop("container", {}))
        metadata = {"name": name, **more.pop("metadata", {})}
        document = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {**spec, **more}}
        reply = self.plane.admin.create(document)
        assert reply.status == 201, reply.message

    def pod(self, name: str) -> Json:
        """As the API server has it."""
        return self.plane.admin.get(f"/api/v1/namespaces/default/pods/{name}")

    def await_phase(self, name: str, phase: str) -> Json:
        """Until the pod is there; it must not end in another one."""

        def there() -> Json | None:
            found = self.pod(name)
            said = found["status"].get("phase")
            assert said == phase or said not in ("Failed", "Succeeded"), (found["status"], self.output(name))
            return found if said == phase else None

        return eventually(there, f"{name} is {phase}", 120) or {}

    def output(self, name: str) -> str:
        """Output of a pod's containers, without the runtime's prefixes."""
        texts = [path.read_text(errors="replace") for path in (self.directory / "logs").glob(f"*_{name}_*/*/*.log")]
        return re.sub(r"(?m)^\S+ (stdout|stderr) \S ", "", "".join(texts))

    def remove(self, name: str) -> None:
        """Returns when it is gone."""
        path = f"/api/v1/namespaces/default/pods/{name}"
        self.plane.admin.delete(path)
        eventually(lambda: self.plane.admin.request("GET", path).status == 404, f"{name} is gone", 120)

    def remove_all(self) -> None:
        """Every pod, however it is."""
        for each in self.plane.admin.get("/api/v1/namespaces/default/pods")["items"]:
            self.remove(each["metadata"]["name"])

    def events(self, name: str) -> list[str]:
        """Events at the end of `kubectl describe pod`."""
        items = self.plane.admin.get("/api/v1/namespaces/default/events")["items"]
        return [f"{each['reason']}: {each['message']}" for each in items if each["involvedObject"]["name"] == name]


def _path() -> str:
    return f"{os.environ[NODE_PROGRAMS]}:{os.environ.get('PATH', '')}"


def _ctr(directory: Path, *words: str) -> str:
    command = [str(program(NODE_PROGRAMS, "ctr")), "-a", str(directory / "containerd.sock"), "-n", "k8s.io", *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def make_image(directory: Path, name: str, root: Path, environment: dict[str, str]) -> None:
    """A root becomes an image of the node."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as packed:
        packed.add(root, ".")
    data = layer.getvalue()
    digest = hashlib.sha256(data).hexdigest()
    config = {
        "architecture": "amd64" if os.uname().machine == "x86_64" else "arm64",
        "os": "linux",
        "config": {"Env": [f"{key}={value}" for key, value in environment.items()], "Cmd": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    archive = directory / "image.tar"
    with tarfile.open(archive, "w") as packed:
        for file, content in (
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
            ("layer.tar", data),
        ):
            member = tarfile.TarInfo(file)
            member.size = len(content)
            packed.addfile(member, io.BytesIO(content))
    _ctr(directory, "images", "import", str(archive))
    archive.unlink()


def _needs(binary: Path, search: str) -> Iterator[Path]:
    """Libraries that the loader would load for a program, and the loader."""
    said = subprocess.run(
        ["ldd", str(binary)], capture_output=True, text=True, check=False, env={**os.environ, "LD_LIBRARY_PATH": search}
    ).stdout
    yield from (Path(found) for found in re.findall(r"(/\S+) \(0x", said))


def fill_root(root: Path, programs: Sequence[Path], driver: Path, libraries: Sequence[Path]) -> None:
    """Programs at the root, the simulated driver where the image looks for it, and what they need where the host has
    it; `libraries` are not in the image, but what they need is."""  # fmt: skip
    for place in ("tmp", "run", "opt", "gpu"):
        (root / place).mkdir(parents=True, exist_ok=True)
    shutil.copytree(driver, root / DRIVER_IN_IMAGE.lstrip("/"))
    wanted = {each for binary in (*programs, *driver.iterdir(), *libraries) for each in _needs(binary, str(driver))}
    for found in wanted:
        if found.is_relative_to(driver):
            continue
        target = root / str(found).lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found, target)
    for binary in programs:
        shutil.copy(binary, root / binary.name)


def _configure(directory: Path, plane: ControlPlane) -> None:
    shim = program(NODE_PROGRAMS, "runc")
    (directory / "containerd.toml").write_text(
        f"""version = 2
root = "{directory}/containerd"
state = "{directory}/state"
[grpc]
  address = "{directory}/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{_PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{directory}/cni"
    bin_dir = "{directory}/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
      BinaryName = "{shim}"
      SystemdCgroup = false
"""
    )
    (directory / "cni").mkdir()
    network = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}
    (directory / "cni" / "10-none.conflist").write_text(json.dumps(network))
    config = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": "127.0.0.1",
        "port": free_port(),
        "healthzPort": 0,
        "readOnlyPort": 0,
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failCgroupV1": False,
        "failSwapOn": False,
        "localStorageCapacityIsolation": False,
        "containerRuntimeEndpoint": f"unix://{directory}/containerd.sock",
        "podLogsDir": str(directory / "logs"),
        "volumePluginDir": str(directory / "volumes"),
        "nodeStatusUpdateFrequency": "1s",
        "nodeStatusReportFrequency": "1s",
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "1Mi", "nodefs.available": "0%", "imagefs.available": "0%"},
        "registerNode": True,
    }
    (directory / "kubelet.json").write_text(json.dumps(config))
    cluster = {"server": f"https://127.0.0.1:{plane.port}", "certificate-authority": str(plane.ca_file)}
    access = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": plane.admin.token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (directory / "kubeconfig").write_text(json.dumps(access))


@contextmanager
def real_node(plane: ControlPlane, compiler: str) -> Iterator[RealNode]:
    """A node that is ready; images of one's own are added with `make_image`."""
    directory = Path(tempfile.mkdtemp(prefix="nvr-"))  # short: sockets lie in it
    directory.chmod(0o711)
    for name in ("gpu", "logs", "kubelet"):
        (directory / name).mkdir()
    (directory / "gpu").chmod(0o777)
    node = RealNode(plane, directory, directory / "gpu")
    _configure(directory, plane)
    try:
        plane.start(
            "containerd",
            [str(program(NODE_PROGRAMS, "containerd")), "--config", str(directory / "containerd.toml")],
            environment={**os.environ, "PATH": _path()},
        )
        eventually(lambda: (directory / "containerd.sock").exists(), "containerd serves")
        _pause_image(directory, compiler)
        scheduler = [str(program(NODE_PROGRAMS, "kube-scheduler")), f"--kubeconfig={directory / 'kubeconfig'}"]
        options = ["--leader-elect=false", f"--secure-port={free_port()}", f"--cert-dir={directory / 'pki'}"]
        plane.start("kube-scheduler", [*scheduler, *options])
        node.start_kubelet()
        yield node
    finally:
        _clean_up(plane, directory)


def _pause_image(directory: Path, compiler: str) -> None:
    root = directory / "pause"
    root.mkdir()
    source = directory / "pause.c"
    source.write_text(_PAUSE_SOURCE)
    subprocess.run([compiler, "-static", "-O1", "-o", str(root / "pause"), str(source)], check=True)
    make_image(directory, _PAUSE, root, {})


def _clean_up(plane: ControlPlane, directory: Path) -> None:
    for name in ("kubelet", "kube-scheduler"):
        if name in plane.processes:
            plane.stop(name)
    if "containerd" in plane.processes:
        with suppress(subprocess.SubprocessError):
            for task in _ctr(directory, "tasks", "ls", "-q").split():
                _ctr(directory, "tasks", "kill", "--signal", "SIGKILL", task)
        plane.stop("containerd")
    for shim in Path("/proc").glob("[0-9]*/cmdline"):  # containerd leaves them, for they outlive its restarts
        with suppress(OSError):
            words = shim.read_bytes().decode(errors="replace").split("\0")
            if words[0].endswith("containerd-shim-runc-v2") and f"{directory}/containerd.sock" in words:
                os.kill(int(shim.parent.name), signal.SIGKILL)
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([each for each in mounts if each.startswith(f"{directory}/")]):
        subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
    shutil.rmtree(directory, ignore_errors=True)
    for left in DEVICE_PLUGINS.glob("kubelet*"):  # its socket, and what it remembers of devices
        left.unlink()
