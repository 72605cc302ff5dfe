"""A client in a process of its own, to be killed: `python holder.py SOCKET UUID [LEASE_ID]`.

Wants the lease, or claims one; prints a line for each message that it gets.  Gives a lease back when it is revoked.
Has a child that inherits the connection and lives until its standard input ends.
"""

import os
import sys
from pathlib import Path

from nvshare.bench.harness.wire_client import Link
from nvshare.coordinator.protocol import messages


def main(path: str, uuid: str, claimed: int) -> None:
    link = Link(Path(path))
    link.socket.settimeout(60)
    if os.fork() == 0:
        os.close(1)
        sys.stdin.read()
        os._exit(0)
    link.send(messages.encode(messages.Hello(messages.PROTOCOL_VERSION, "holder", "test", 1, 0)))
    link.send(messages.encode(messages.AttachGpu(0, uuid, claimed, not claimed, 0, 0, 0)))
    while True:
        for frame in link.take():
            message = messages.decode(frame, messages.TO_CLIENT)
            print(type(message).__name__, getattr(message, "lease_id", ""), flush=True)
            if isinstance(message, messages.Revoke):
                link.send(messages.encode(messages.Release(0, message.lease_id, 0, True, False, 0, 0, 0)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 0)
