"""A whole node: kubelet double, coordinator, plugin and containers as real processes that share a simulated GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nvshare.client_hook.launcher import SYSTEM_PRELOAD
from nvshare.coordinator.kubernetes.slots.slot import remove, write
from nvshare.simulated_gpu.trace import overlaps
from tests.conftest import ROOT, Built
from tests.end_to_end.conftest import finish, stop
from tests.kubernetes.node.kubelet import AdmissionError
from tests.kubernetes.node.processes import GPU, Node, new_node
from tests.waiting import eventually

CHECK = (ROOT / "charts" / "nvshare" / "files" / "check_slot.py").read_text(encoding="utf-8")
HOLD = str(Path(__file__).parent / "hold_memory.py")
LONG = ["60", "1000000", "4"]


def first_line(process: subprocess.Popen[str]) -> dict[str, int]:
    """First line of a program that stays."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    found: dict[str, int] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def serving(built: Built) -> Iterator[Node]:
    """A node that serves slots; tests only add pods to it."""
    with new_node(built.hook) as node:
        node.install()
        node.start_coordinator()
        node.start_plugin("--cdi-kind", "nvidia.com/gpu")
        node.kubelet.await_devices(GPU, 10)
        yield node


def test_bad_requests_name_the_field(serving: Node) -> None:
    """Else a user sees `UnexpectedAdmissionError` and nothing to act on."""
    before, devices = serving.slot_files(), list(serving.kubelet.devices(GPU))
    field = r"container_requests\[0\].devices_ids: "
    for ids, text in (
        (devices[:2], f"{GPU}: {field}2 slots of the same GPU .* --allow-several-slots"),
        (["GPU-nowhere::1"], f"{field}GPU-nowhere::1: this node has no such GPU; it has GPU-"),
        (["gpu"], f"{field}'gpu' is no slot"),
        ([devices[0], devices[0]], f"{field}.* is named twice"),
    ):
        with pytest.raises(AdmissionError, match=text):
            serving.kubelet.admit("bad", {GPU: len(ids)}, ids={GPU: ids})
    assert serving.slot_files() == before
    assert serving.series("plugin", "nvshare_plugin_allocations_total", outcome="refused", resource=GPU) == [4]


def test_two_pods_share_a_gpu(serving: Node, saturate: Path) -> None:
    """Else the product does not work on Kubernetes: slots, mounts, environment, turns, and figures by pod."""
    node = serving
    grants = [node.kubelet.admit(pod, {GPU: 1}) for pod in ("first", "second")]
    assert all(grant.environment["NVIDIA_VISIBLE_DEVICES"].startswith("GPU-") for grant in grants)
    uuid = grants[0].environment["NVIDIA_VISIBLE_DEVICES"]
    assert grants[0].cdi_devices == [f"nvidia.com/gpu={uuid}"]
    running = [node.contain(grant, [str(saturate), *LONG]) for grant in grants]
    eventually(lambda: node.status()["gpus"][0]["handovers"] >= 4, f"hand-overs\n{node.log('coordinator')}")
    eventually(lambda: {"first", "second"} <= set(node.slots()), "the pods' names")
    for words in (("slots", "-o", "wide"), ("clients", "-o", "wide")):
        shown = node.table(*words)
        assert "default/first/main" in shown
        assert grants[1].annotations["nvshare.com/slot"] in shown
    assert "default/first/main" in node.table("clients")
    for process in running:
        stop(process)
    assert not overlaps(node.trace())
    for pod in ("first", "second"):
        labels = {"namespace": "default", "pod": pod, "container": "main"}
        assert node.series("coordinator", "nvshare_slot_leases_total", **labels)[0] >= 2
        assert node.series("coordinator", "nvshare_slot_lease_seconds_total", **labels)[0] > 0
        assert node.series("coordinator", "nvshare_slot_unregistered", **labels) == [0]


def test_what_helm_test_runs(serving: Node) -> None:
    """Else `helm test` fails on a node that works, or passes where the hook is missing."""
    check = [sys.executable, "-c", CHECK]
    grant = serving.kubelet.admit("test-slot", {GPU: 1})
    said, errors = serving.contain(grant, check).communicate()
    assert said.startswith("OK: 1 GPU"), errors
    unhooked = [mount for mount in grant.mounts if mount[1] != SYSTEM_PRELOAD]
    elsewhere = grant.environment | {"NVSHARE_SOCKET": "/nowhere"}
    for broken, text in (
        (replace(grant, mounts=unhooked), "the hook is not loaded"),
        (replace(grant, environment=elsewhere), "no coordinator answers at '/nowhere'"),
    ):
        process = serving.contain(broken, check)
        assert text in process.communicate()[1]
        assert process.returncode == 1


def test_a_slots_limit_binds_all_its_processes(serving: Node) -> None:
    """Broken: a pod has more memory than its slot's limit, by one process or by several."""
    node = serving
    grant = node.kubelet.admit("small", {GPU: 1})
    eventually(lambda: "small" in node.slots(), "the slot's pod")
    slot = node.slot_files()[grant.annotations["nvshare.com/slot"]]
    write(node.slots_dir, slot.model_copy(update={"policy": {"memory_limit": "1GiB"}}))  # as the watch of pods does
    eventually(lambda: node.slots()["small"]["limit_bytes"] == 1 << 30, "the limit of the slot")
    # What the pod says itself does not count: the kubelet puts its environment behind ours.
    grant.environment["NVSHARE_MEMORY_LIMIT"] = "3GiB"
    holder = node.contain(grant, [sys.executable, HOLD, "640", "1024", "stay"])
    assert first_line(holder) == {"total_mib": 1024, "had_mib": 640, "result": 0}
    second = finish(node.contain(grant, [sys.executable, HOLD, "4096", "1024"]))
    assert second["had_mib"] == 384
    assert second["result"] == 2  # out of memory, as CUDA says it
    unlimited = finish(node.contain(node.kubelet.admit("other", {GPU: 1}), [sys.executable, HOLD, "2048"]))
    assert unlimited["had_mib"] == 2048


def test_the_drivers_limit_is_there_before_the_container(node: Node, tmp_path: Path) -> None:
    """Broken: a container starts without the driver's limit, with that of an earlier pod, or with one that it chose."""
    cdi = tmp_path / "cdi"
    node.start_plugin("--memory-boundary", "on", "--processes", "2", "--cdi-dir", str(cdi))
    node.kubelet.await_devices(GPU, 10)
    grant = node.kubelet.admit("held", {GPU: 1})
    name = grant.annotations["nvshare.com/slot"]
    assert grant.cdi_devices == [f"nvshare.com/slot={name}"]
    with pytest.raises(AdmissionError, match=r"the driver's memory limit cannot be set: .*No such file"):
        node.kubelet.start_container(grant)
    cdi.mkdir()
    socket = "NVSHARE_SOCKET=/run/nvshare/hooks.sock"
    for limit, expected in (("1GiB", ["NVIDIA_GPU_MEMORY_LIMIT=2048", socket]), ("0", [socket])):
        slot = node.slot_files()[name]
        write(node.slots_dir, slot.model_copy(update={"policy": {"memory_limit": limit}}))
        node.kubelet.start_container(grant)
        (file,) = cdi.iterdir()
        made = json.loads(file.read_text())
        assert made["kind"] == "nvshare.com/slot"
        assert made["devices"] == [{"name": name, "containerEdits": {"env": expected}}]
    assert node.slot_files()[name].pod is not None


def test_an_idle_pod_is_parked(serving: Node) -> None:
    """Broken: pods are never parked, though the coordinator sees their processes."""
    node = serving
    running = node.contain(node.kubelet.admit("idle", {GPU: 1}), [sys.executable, HOLD, "64", "4096", "stay"])
    assert first_line(running) == {"total_mib": 4096, "had_mib": 64, "result": 0}
    for wanted in ("running", "parked"):
        (client,) = (each for each in node.status()["clients"] if each["process_id"] == running.pid)
        assert client["parking"] == wanted
        node.control("park", f"c{client['client']}")
    running.kill()
    running.wait()


def test_a_restarted_kubelet_gets_everything_again(node: Node, saturate: Path) -> None:
    """Else GPUs are gone from the node after each restart of its kubelet, and its containers cannot start again."""
    node.start_plugin("--slots-per-gpu", "2")
    node.kubelet.await_devices(GPU, 2)
    grant = node.kubelet.admit("job", {GPU: 1})
    node.kubelet.stop()
    node.kubelet.refuse = 2
    node.kubelet.start()
    node.kubelet.await_devices(GPU, 2)
    assert node.kubelet.registrations == [GPU] * 4  # one before, two refused, one after
    assert node.kubelet.admit("job", {GPU: 1}) is grant  # the kubelet does not ask for what it has
    finish(node.contain(grant, [str(saturate), "0.05", "1000000", "2"]))
    node.kubelet.admit("next", {GPU: 1})


def test_upgrade_leaves_containers_what_they_mounted(node: Node, saturate: Path, tmp_path: Path) -> None:
    """Else an upgrade of the plugin disturbs running containers, or a restarted one finds no or another library."""
    node.start_plugin()
    node.kubelet.await_devices(GPU, 10)
    old = node.kubelet.admit("old", {GPU: 1})
    running = node.contain(old, [str(saturate), *LONG])
    eventually(lambda: "old" in node.slots() and node.slots()["old"]["leases"], "the slot's lease")
    before = node.slot_files()
    versions = []
    for number in (1, 2):
        newer = tmp_path / str(number) / node.hook.name
        newer.parent.mkdir()
        shutil.copy(node.hook, newer)
        with newer.open("ab") as file:
            file.write(bytes([number]))  # behind the ELF file's end: the same library with another digest
        versions.append(node.install(newer))
    assert node.stop(node.plugin) == 0
    eventually(lambda: node.kubelet.endpoints[GPU].ended.is_set(), "the end of the stream")
    assert running.poll() is None
    node.start_plugin()
    eventually(lambda: len(node.kubelet.registrations) == 2, "another registration")
    node.kubelet.await_devices(GPU, 10)
    assert node.slot_files() == before
    new = node.kubelet.admit("new", {GPU: 1})
    sources = [{inner: outer for outer, inner in grant.mounts}["/opt/nvshare"] for grant in (old, new)]
    assert Path(sources[0]).name != versions[1]
    assert Path(sources[1]).name == versions[1]
    stop(running)
    for grant in (old, new):  # the old one from the kubelet's memory
        finish(node.contain(grant, [str(saturate), "0.05", "1000000", "2"]))


def test_without_a_coordinator_no_slot_is_given_out(node: Node, saturate: Path) -> None:
    """Else pods wait on a node without a coordinator, or a restart of it cuts running containers off for ever."""
    node.start_plugin("--coordinator-grace", "1ms", "--preferred", "pack")
    node.kubelet.await_devices(GPU, 10)
    grant = node.kubelet.admit("early", {GPU: 1})
    running = node.contain(grant, [str(saturate), *LONG])
    eventually(lambda: "early" in node.slots() and node.slots()["early"]["clients"] == 1, "the pod's process")
    assert node.stop(node.coordinator) == 0
    node.kubelet.await_devices(GPU, 0)
    with pytest.raises(AdmissionError, match="1 wanted, 0 free"):
        node.kubelet.admit("late", {GPU: 1})
    node.start_coordinator()
    node.kubelet.await_devices(GPU, 10)
    eventually(lambda: node.slots()["early"]["clients"] == 1, "the pod's process again")
    assert node.kubelet.admit("late", {GPU: 1}).mounts != grant.mounts
    stop(running)


def test_what_goes_from_the_node_is_noticed(node: Node) -> None:
    """Else figures of pods that ended long ago stay, or nobody notices that containers run without the hook."""
    node.start_plugin()
    node.kubelet.await_devices(GPU, 10)
    grant = node.kubelet.admit("gone", {GPU: 1})
    eventually(lambda: "gone" in node.slots(), "the slot")
    node.kubelet.remove(grant)
    again = node.kubelet.admit("next", {GPU: 1}, ids={GPU: grant.devices[GPU]})
    assert again.mounts == grant.mounts
    eventually(lambda: set(node.slots()) == {"next"}, "the slot's new owner")
    remove(node.slots_dir, again.annotations["nvshare.com/slot"])
    eventually(lambda: not node.slots(), "the coordinator to forget it")
    # The library too: containers run without it, which a metric shows, and no new ones are admitted.
    odd = node.kubelet.admit("odd", {GPU: 1})
    shutil.rmtree(node.library_dir)
    assert finish(node.contain(odd, [sys.executable, "-c", "print('{}')"])) == {}
    await_unregistered(node, "odd")
    with pytest.raises(AdmissionError, match=r"no hook library in .*: run `nvshare-install-library --to"):
        node.kubelet.admit("later", {GPU: 1})


def test_a_container_cannot_change_its_slot(serving: Node) -> None:
    """Else a pod lifts its own limit; and a pod that is not root could not connect at all."""
    node = serving
    if not node.real_mounts:
        pytest.skip("needs root: the mounts are the protection")
    grant = node.kubelet.admit("curious", {GPU: 1})
    eventually(lambda: "curious" in node.slots(), "the socket")
    program = (
        "import json, socket; s = socket.socket(socket.AF_UNIX); s.connect('/run/nvshare/hooks.sock')\n"
        "errors = []\n"
        "for path in ('/run/nvshare/slot.json', '/run/nvshare/more', '/opt/nvshare/lib/libnvshare_hook.so',\n"
        "    '/etc/ld.so.preload'):\n"
        "    try: open(path, 'a')\n"
        "    except OSError as error: errors.append(error.errno)\n"
        "print(json.dumps({'slot': json.load(open('/run/nvshare/slot.json'))['slot'], 'errors': errors}))"
    )
    for user in (None, 65534):
        told = finish(node.contain(grant, [sys.executable, "-c", program], user=user))
        assert told["slot"] == grant.annotations["nvshare.com/slot"]
        assert len(told["errors"]) == 4, told


LOOK = r"""
import json, re
with open("/proc/self/maps") as maps:
    found = maps.read()
hooks = sorted(set(re.findall(r"/\S*libnvshare_hook.so", found)))
print(json.dumps({"hooks": hooks, "own": "/libanl" in found}))
"""


def test_a_pods_own_preload_replaces_nothing(serving: Node) -> None:
    """Broken: a pod with an LD_PRELOAD uses the GPU out of turn, or nvshare-run ends or adds its own package's hook."""
    node = serving
    if not node.real_mounts:
        pytest.skip("needs root: without the mounts LD_PRELOAD takes their place")
    grant = node.kubelet.admit("preloading", {GPU: 1})
    assert "LD_PRELOAD" not in grant.environment
    hook = "/opt/nvshare/lib/libnvshare_hook.so"
    look = [sys.executable, "-c", LOOK]
    run = [sys.executable, "-m", "nvshare.coordinator.cli.run", "--", *look]
    own, with_package = {"LD_PRELOAD": "libanl.so.1"}, {"PYTHONPATH": str(ROOT), "NVSHARE_SIMULATE": ""}
    for environment, command in ((own, look), (own | with_package, run)):
        made = replace(grant, environment=grant.environment | environment)
        found = finish(node.contain(made, command))
        assert found["hooks"] == [hook]
        assert found["own"]


def test_a_setuid_program_takes_no_settings_from_its_caller(serving: Node) -> None:
    """Broken: a container's user writes to any file as root, by NVSHARE_LOG_FILE and a setuid program with the hook."""
    node = serving
    if not node.real_mounts:
        pytest.skip("needs root: without the mounts a setuid program has no hook")
    grant = node.kubelet.admit("setuid", {GPU: 1})
    program, log = node.directory / "cat", node.directory / "log"
    shutil.copy("/bin/cat", program)
    program.chmod(0o4755)
    command = ["env", f"NVSHARE_LOG_FILE={log}", "NVSHARE_LOG=what the user writes", str(program)]
    out, errors = node.contain(grant, [*command, "/proc/self/maps", "/proc/self/status"], user=65534).communicate()
    assert "libnvshare_hook.so" in out, errors
    assert "Uid:\t65534\t0\t0" in out, "the file system allows no setuid programs"
    assert not log.exists()


def test_an_image_with_another_libc_is_left_alone_and_seen(serving: Node, tmp_path: Path) -> None:
    """Else the hook, which musl loads but cannot resolve, ends every program in an Alpine image with code 127."""
    musl = shutil.which("musl-gcc")
    if musl is None:
        pytest.skip("musl-gcc is missing (Debian: apt-get install musl-tools)")
    node = serving
    grant = node.kubelet.admit("alpine", {GPU: 1})
    hello, source = tmp_path / "hello", tmp_path / "hello.c"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("{}") < 0; }\n')
    subprocess.run([musl, "-o", str(hello), str(source)], check=True)
    assert finish(node.contain(grant, [str(hello)])) == {}
    await_unregistered(node, "alpine")


def await_unregistered(node: Node, pod: str) -> None:
    """Until the metric shows that no hook came from this pod."""
    labels = {"pod": pod, "namespace": "default", "container": "main"}
    eventually(
        lambda: node.series("coordinator", "nvshare_slot_unregistered", **labels) == [1], "the metric that shows it"
    )
