"""A part of jupyterhub_config.py, for a hub that runs as root: each user's notebooks share the GPU in a slot."""

import re
import subprocess

LIMITS = ["--gpu=0", "--class=interactive", "--share-limit=50%", "--memory-limit=8GiB"]


def unix_user(spawner):
    """The user of the server's processes; with SimpleLocalProcessSpawner the hub's own, os.getuid()."""
    return spawner.user.name


def make_slot(spawner):
    """Gives the user a slot before the server starts; a failure ends the start, and the hub logs it."""
    name = f"hub-{re.sub('[^A-Za-z0-9]+', '-', spawner.user.name)[:32]}-{spawner.user.id}"
    command = ["nvshare-ctl", "slot", "add", name, f"--user={unix_user(spawner)}", *LIMITS]
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        raise RuntimeError(made.stderr)
    spawner.environment = {
        **spawner.environment,
        "NVSHARE_RUNTIME_DIR": made.stdout.strip(),
        "NVSHARE_ENABLE": "1",  # every Python kernel whose environment has nvshare
    }


c.Spawner.pre_spawn_hook = make_slot  # noqa: F821 (JupyterHub defines it)
