"""As made_up_gpus.py, where the runtime directory is the system's: all users may connect."""

if __name__ == "__main__":
    import sys
    from pathlib import Path

    import made_up_gpus  # type: ignore[import-not-found]  # beside this program

    from nvshare.coordinator.system import runtime_dir

    runtime_dir.SYSTEM_DIRECTORY = Path(sys.argv[3])  # type: ignore[misc]
    assert sys.argv[2] == "--runtime-dir"
    devices = [made_up_gpus.Device(0, made_up_gpus.uuid_of(0), "made-up GPU", 8 << 30)]
    made_up_gpus.serve_devices(sys.argv[2:], devices)
