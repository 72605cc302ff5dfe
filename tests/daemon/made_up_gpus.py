"""A coordinator on made-up GPUs: `python made_up_gpus.py COUNT [nvshare-coordinator's options]`."""

import sys

from nvshare.coordinator.daemon.main import serve_devices
from nvshare.coordinator.system.devices import Device

UUID = "GPU-00000000-0000-0000-0000-{:012d}"


def uuid_of(gpu: int) -> str:
    """UUID of the made-up GPU with that index."""
    return UUID.format(gpu)


def main() -> None:
    """Serves until it is told to stop."""
    devices = [Device(index, uuid_of(index), "made-up GPU", 8 << 30) for index in range(int(sys.argv[1]))]
    serve_devices(sys.argv[2:], devices)


if __name__ == "__main__":
    main()
