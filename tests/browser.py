"""A headless Chromium, driven over a pipe by its DevTools protocol.

Non-goals: other browsers; waiting for a page's content, which is the tests' business (tests/waiting.py).
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome-headless-shell")
OPTIONS = (
    "--headless",
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


def find() -> str | None:
    """A browser of this machine."""
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """One that leaves nothing behind."""
    with tempfile.TemporaryDirectory(prefix="nvs-", ignore_cleanup_errors=True) as profile:
        made = Browser(executable, Path(profile))
        try:
            yield made
        finally:
            made.close()


class BrowserError(Exception):
    """The browser refused a command, or a script failed in the page."""


class Browser:
    """One browser with one page."""

    def __init__(self, executable: str, profile: Path) -> None:
        command_read, self._commands = os.pipe()
        self._replies, reply_write = os.pipe()
        # The browser reads descriptor 3 and writes 4.
        inherit = f'exec "$@" 3<&{command_read} 4>&{reply_write}'
        null = subprocess.DEVNULL
        self._process = subprocess.Popen(
            ["bash", "-c", inherit, "bash", executable, *OPTIONS, f"--user-data-dir={profile}"],
            pass_fds=(command_read, reply_write), stdin=null, stdout=null, stderr=null,
        )  # fmt: skip
        os.close(command_read)
        os.close(reply_write)
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """Uncaught exceptions and violated content policies of the page."""
        target = self._command("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self._command(f"{domain}.enable")

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """The window and the preferred colours."""
        self._command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self._command("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        done = self._command("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise BrowserError(str(done["exceptionDetails"]))
        return done["result"].get("value")

    def click(self, element: str) -> None:
        """The mouse in the middle of an element, which a script finds."""
        box = self.evaluate(f"(({element}).getBoundingClientRect().toJSON())")
        where = {"x": box["x"] + box["width"] / 2, "y": box["y"] + box["height"] / 2, "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._command("Input.dispatchMouseEvent", type=kind, **where)

    def press(self, key: str, code: int, *, control: bool = False) -> None:
        """One key, as a person presses it."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            held = {"modifiers": 2} if control else {}
            names = {"key": key, "code": key, "windowsVirtualKeyCode": code}
            self._command("Input.dispatchKeyEvent", type=kind, **names, **text, **held)

    def type(self, text: str) -> None:
        self._command("Input.insertText", text=text)

    def spoken(self) -> list[tuple[str, str]]:
        """(role, name) of everything that a screen reader says."""
        nodes = self._command("Accessibility.getFullAXTree")["nodes"]
        return [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        whole = self._command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": whole["width"], "height": whole["height"], "scale": 1}
        shot = self._command("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _command(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == self._number:
                if "error" in reply:
                    raise BrowserError(f"{method}: {reply['error']}")
                return reply["result"]
            self._note(reply)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            read = os.read(self._replies, 1 << 20)
            if not read:
                raise BrowserError("the browser has ended")
            self._unread += read
        frame, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(frame)
        return message

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["source"] != "network":
            self.complaints.append(str(event["params"]["entry"]))

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._commands)
        os.close(self._replies)
