"""The command `nvshare-ctl top`: asks, draws and carries out keys."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Final

import typer

from nvshare.coordinator.cli.ctl_call import Where, call, directory_of, refusals, until_interrupted
from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.api import ControlError
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.system.runtime_dir import RuntimeDir

RATED: Final = 6
"""Rates are those between the newest and the oldest of so many replies."""
FIRST_S: Final = 0.3
"""Between the two replies of `--once`, which give rates."""

Every = Annotated[float, typer.Option("--every", min=0.1, metavar="SECONDS", help="time between two frames")]
Once = Annotated[bool, typer.Option("--once", help="print one frame; so does a pipe")]


def register(app: typer.Typer) -> None:
    """Adds the command to the application."""
    app.command()(top)


def top(context: typer.Context, every: Every = 1.0, once: Once = False, where: Where = None) -> None:
    """Show who runs, who waits and why, live; keys filter, pause, end and change programs."""
    directory = directory_of(context, where)
    with refusals(as_json=False), until_interrupted():
        if once or not (sys.stdout.isatty() and sys.stdin.isatty()):
            _print_once(directory)
        else:
            _follow(directory, every)


def _print_once(directory: RuntimeDir) -> None:
    from rich.console import Console  # slow to import

    from nvshare.coordinator.cli.top.choice import Choice
    from nvshare.coordinator.cli.top.frame import Screen, frame

    before = call(directory, api.Status())
    time.sleep(FIRST_S)
    console = Console(highlight=False)
    unicode = console.encoding.lower().startswith("utf")
    screen = Screen(console.width if console.is_terminal else 160, None, _clock(), unicode, live=False)
    for line in frame(call(directory, api.Status()), before, Choice(), screen):
        console.print(line, soft_wrap=True)


def _follow(directory: RuntimeDir, every_s: float) -> None:
    from rich.console import Console  # slow to import
    from rich.live import Live
    from rich.text import Text

    from nvshare.coordinator.cli.top.choice import Choice, press
    from nvshare.coordinator.cli.top.frame import Screen, frame
    from nvshare.coordinator.cli.top.history import History
    from nvshare.coordinator.cli.top.keyboard import Keyboard

    console = Console(highlight=False)
    unicode = console.encoding.lower().startswith("utf")
    choice = Choice()
    replies = deque([call(directory, api.Status())], maxlen=RATED)
    history = History()
    history.add(replies[-1])
    next_s = time.monotonic() + FIRST_S
    with Keyboard() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        while not choice.ended:
            screen = Screen(console.width, console.height, _clock(), unicode)
            lines = frame(replies[-1], replies[0], choice, screen, history)
            live.update(Text("\n", no_wrap=True).join(lines), refresh=True)
            for key in keyboard.wait(next_s - time.monotonic()):
                choice, request = press(key, choice, replies[-1])
                if request is not None:
                    choice = replace(choice, said=_carried_out(directory, request))
                    next_s = time.monotonic()
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + every_s
                try:
                    replies.append(call(directory, api.Status()))
                    history.add(replies[-1])
                except (ControlError, NoCoordinatorError) as error:
                    choice = replace(choice, said=f"{error}; trying again")
                    replies = deque([replies[-1]], maxlen=RATED)


def _carried_out(directory: RuntimeDir, request: api.Request) -> str:
    from nvshare.coordinator.cli.top.choice import answer

    try:
        result: Mapping[str, Any] = call(directory, request)
    except (ControlError, NoCoordinatorError) as error:
        return str(error)
    return answer(request, result)


def _clock() -> str:
    return time.strftime("%H:%M:%S")
