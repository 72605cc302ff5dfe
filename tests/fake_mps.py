"""A double of `nvidia-cuda-mps-control` for PATH, with the rules that nvshare relies on.

`-d` starts a daemon with a pid file and a socket in the pipe directory.  Without arguments it sends its input to the
daemon: `start_server -uid N`, `get_server_list`, `get_client_list PID`, `quit`.  The server is a child process.  The
file `clients` beside the script has the clients' process ids.  The file `mode` beside it changes the behaviour:
`refuse` (-d fails), `no-server`.
"""

import os
import signal
import socket
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PIPE = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))


def install(folder: Path, python: str = sys.executable) -> str:
    """Puts the double into this folder, for PATH."""
    folder.mkdir(exist_ok=True)
    script = folder / "nvidia-cuda-mps-control"
    script.write_text(f"#!{python}\n" + Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    script.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def read(name: str) -> list[str]:
    path = HERE / name
    return path.read_text(encoding="utf-8").split() if path.exists() else []


def start_server() -> int:
    """A process that ends by SIGTERM, and with its daemon, which a test may kill."""
    daemons_end, _ = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(daemons_end, 0)
        os.closerange(3, 256)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.read(0, 1)
        os._exit(0)
    os.close(daemons_end)
    return pid


def answer(command: str, servers: list[int]) -> str:
    """The daemon's answer to one command."""
    match command.split():
        case ["start_server", "-uid", _]:
            if "no-server" not in read("mode"):
                servers.append(start_server())
            return ""
        case ["get_server_list"]:
            return "".join(f"{pid}\n" for pid in servers)
        case ["get_client_list", _]:
            return "".join(f"{pid}\n" for pid in read("clients"))
    return f"unknown command {command}\n"


def serve(listener: socket.socket) -> None:
    """The daemon: until `quit`, and then until it has no clients."""
    servers: list[int] = []
    (PIPE / "nvidia-cuda-mps-control.pid").write_text(str(os.getpid()), encoding="ascii")
    while True:
        connection, _ = listener.accept()
        with connection:
            command = connection.recv(4096).decode()
            if command.strip() == "quit":
                break
            connection.sendall(answer(command, servers).encode())
    listener.close()
    while read("clients"):
        signal.sigtimedwait([signal.SIGUSR1], 0.02)
    for pid in servers:
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)


def main() -> int:
    path = str(PIPE / "control")
    if sys.argv[1:] == ["-d"]:
        if "refuse" in read("mode"):
            sys.stderr.write("An instance of this daemon is already running\n")
            return 1
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(16)
        if os.fork() == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(null, number)
            serve(listener)
        return 0
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(path)
        except OSError:
            sys.stderr.write("Cannot find MPS control daemon process\n")
            return 1
        connection.sendall(sys.stdin.read().encode())
        while piece := connection.recv(4096):
            sys.stdout.write(piece.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
