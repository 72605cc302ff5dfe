"""The fixture itself: a container of a real containerd sees what the kubelet gave it."""

from __future__ import annotations

import json

from tests.kubernetes.containerd.runtime import RUNNING, Containerd


def test_a_container_has_its_variables_mounts_and_devices(containerd: Containerd) -> None:
    """Broken: tests of containers see another environment than a kubelet's containers, or a CDI device of nobody."""
    mount = {"hostPath": "/etc/hostname", "containerPath": "/cdi", "options": ["ro", "bind"]}
    edits = {"env": ["FROM_CDI=yes"], "mounts": [mount]}
    spec = {"cdiVersion": "0.5.0", "kind": "nvshare.test/gpu", "devices": [{"name": "a", "containerEdits": edits}]}
    (containerd.cdi_dir / "a.json").write_text(json.dumps(spec))
    pod = containerd.pod("one", {"a": "b"})
    command = ["/bin/sh", "-c", "echo $GIVEN $FROM_CDI; test -s /cdi && test -d /given && exit 3"]
    made = containerd.run(
        pod, "main", command, {"GIVEN": "30"}, mounts=[(str(containerd.base), "/given")], cdi=["nvshare.test/gpu=a"]
    )
    assert containerd.finish(made) == (3, "30 yes\n")
    containerd.remove_pod(pod)


def test_containers_outlive_containerd(containerd: Containerd) -> None:
    """Broken: a test of containerd's restart tests the start of a new container instead."""
    made = containerd.run(containerd.pod("two"), "main", ["/busybox", "sleep", "1000"])
    containerd.stop()
    containerd.start()
    assert containerd.state(made) == RUNNING
    containerd.remove(made)


def test_the_same_container_again(containerd: Containerd) -> None:
    """Broken: the remains of a container are in the way of its restart."""
    pod = containerd.pod("again")
    for _ in range(2):
        made = containerd.run(pod, "main", ["/bin/sh", "-c", "echo here"])
        assert containerd.finish(made) == (0, "here\n")
        containerd.remove(made)
