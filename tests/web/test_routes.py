"""The page's routes in front of a scripted coordinator."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from nvshare.coordinator.daemon.control import api
from nvshare.coordinator.daemon.control.sockets import NoCoordinatorError
from nvshare.coordinator.system import web_process
from nvshare.coordinator.web import live, view
from nvshare.coordinator.web.app import TOKEN_HEADER, make_app
from nvshare.coordinator.web.live import Live
from tests.web.conftest import ScriptedReader

TOKEN = "a token of twenty-two"
WITH_TOKEN = {TOKEN_HEADER: TOKEN}
HERE = "http://127.0.0.1:8080"


@pytest.fixture
def reader() -> ScriptedReader:
    return ScriptedReader()


@pytest.fixture
def page(reader: ScriptedReader) -> Iterator[TestClient]:
    """A page that takes changes."""
    with TestClient(make_app(reader, TOKEN), base_url=HERE) as made:
        yield made


@pytest.mark.parametrize(
    ("path", "kind"), [("/", "text/html"), ("/page.js", "text/javascript"), ("/page.css", "text/css")]
)
def test_files_are_served_with_a_strict_policy(page: TestClient, path: str, kind: str) -> None:
    """Broken if the page came without its files, or could load anything from elsewhere."""
    reply = page.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith(kind)
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "http://" not in reply.text
    assert "https://" not in reply.text


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "127.0.0.1.evil.example", "", "[::2]:8080"])
def test_foreign_hosts_are_refused(page: TestClient, reader: ScriptedReader, host: str) -> None:
    """Broken if another site's name that resolves to loopback could read the page or change something."""
    for path in ("/", "/live"):
        assert page.get(path, headers={"Host": host}).status_code == 421
    reply = page.post("/change", json={"ask": "pause", "client": "1"}, headers={**WITH_TOKEN, "Host": host})
    assert reply.status_code == 421
    assert reader.asked == []


@pytest.mark.parametrize("host", ["localhost:9000", "127.0.0.1", "[::1]:9000"])
def test_forwarded_ports_work(page: TestClient, host: str) -> None:
    """Broken if `ssh -L` with another port were refused."""
    assert page.get("/", headers={"Host": host}).status_code == 200


def test_changes_reach_the_coordinator(page: TestClient, reader: ScriptedReader) -> None:
    """Broken if a button of the page did nothing, or something else."""
    wanted: list[api.Request] = [
        api.Pause(client="1"),
        api.Resume(client="1"),
        api.Set(setting="class", client="1", value="best_effort"),
        api.Set(setting="quantum", value=20_000_000, gpu="0"),
        api.Set(setting="quantum", value=None, gpu="0"),
    ]
    for request in wanted:
        reply = page.post("/change", json=request.model_dump(), headers={**WITH_TOKEN, "Origin": HERE})
        assert reply.json() == {"result": {"done": request.ask}}
    assert reader.asked == wanted


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({TOKEN_HEADER: TOKEN[:-1]}, 401),
        ({TOKEN_HEADER: "é" * 16}, 401),
        ({**WITH_TOKEN, "Origin": "http://evil.example"}, 403),
        ({**WITH_TOKEN, "Origin": "http://127.0.0.1:9999"}, 403),
        ({**WITH_TOKEN, "Origin": "null"}, 403),
        ({**WITH_TOKEN, "Sec-Fetch-Site": "cross-site"}, 403),
        ({**WITH_TOKEN, "Sec-Fetch-Site": "same-site"}, 403),
        ({**WITH_TOKEN, "Content-Type": "text/plain"}, 400),
    ],
)
def test_changes_need_token_and_origin(
    page: TestClient, reader: ScriptedReader, headers: dict[str, str], status: int
) -> None:
    """Broken if another page or a user without the token could pause programs."""
    with_kind = {"Content-Type": "application/json"} | headers
    raw = [(name.encode(), value.encode("latin-1")) for name, value in with_kind.items()]
    reply = page.post("/change", content='{"ask":"pause","client":"1"}', headers=raw)
    assert reply.status_code == status
    assert reader.asked == []


@pytest.mark.parametrize(
    "body",
    [
        b"", b"[]", b"{", b'{"ask": "set", "setting": "policy", "value": "x"}', b'{"ask": "status"}',
        b'{"ask": "pause"}', b'{"ask": "set", "setting": "quantum", "value": 5}',
        b'{"ask": "pause", "client": "\\ud800"}', b'{"ask": "pause", "client": "' + b"x" * 5000 + b'"}', b"[" * 4000,
    ],
)  # fmt: skip
def test_other_requests_are_refused(page: TestClient, reader: ScriptedReader, body: bytes) -> None:
    """Broken if the token allowed more than the page shows, or bad input broke the server."""
    reply = page.post("/change", content=body, headers={**WITH_TOKEN, "Content-Type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["text"]
    assert reader.asked == []


def test_without_a_token_nothing_changes(reader: ScriptedReader) -> None:
    """Broken if a page without a token file took the empty token."""
    with TestClient(make_app(reader, None), base_url=HERE) as page:
        reply = page.post("/change", json={"ask": "pause", "client": "1"}, headers={TOKEN_HEADER: ""})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "read_only")
    assert reader.asked == []


def test_get_changes_nothing(page: TestClient, reader: ScriptedReader) -> None:
    """Broken if a link could change something."""
    assert page.get("/change", headers=WITH_TOKEN).status_code in (404, 405)
    assert reader.asked == []


@pytest.mark.parametrize(
    ("problem", "status"), [(api.ControlError("client", "no client"), 400), (NoCoordinatorError("none"), 503)]
)
def test_refusals_are_told(page: TestClient, reader: ScriptedReader, problem: Exception, status: int) -> None:
    """Broken if the page showed success for a refused change."""
    reader.problem = problem
    reply = page.post("/change", json={"ask": "pause", "client": "9"}, headers=WITH_TOKEN)
    assert (reply.status_code, reply.json()["error"]["text"]) == (status, str(problem))


async def _next(pictures: AsyncIterator[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(await asyncio.wait_for(anext(pictures), 60))
    return found


def granted(sequence: int, client: int, name: str) -> dict[str, Any]:
    event = {"seq": sequence, "at_ns": sequence, "kind": "granted", "uuid": "u", "waited_ns": 0}
    return event | {"client": client, "name": name}


def test_pictures(reader: ScriptedReader) -> None:
    """Broken if a browser did not get the programs, the reason, or the time line from before it looked."""

    async def look() -> None:
        shown = Live(reader, period_s=0.0)
        shown.take_event(granted(1, 1, "first.py"))
        running = asyncio.create_task(shown.run())
        pictures = shown.join()
        assert pictures is not None
        whole = await _next(pictures)
        assert whole["whole"]
        assert [span[2:4] for span in whole["spans"]] == [[1, "hold"]]
        assert whole["gpus"][0]["why"].startswith("first.py")
        states = {each["name"]: (each["running"], each["waiting_ms"] is not None) for each in whole["programs"]}
        assert states == {"first.py": (True, False), "second.py": (False, True)}
        reader.problem = NoCoordinatorError("it has ended")
        while "error" not in (later := await _next(pictures)):
            assert later["spans"] == []
        assert later == {"error": "it has ended"}
        running.cancel()

    asyncio.run(look())


def test_names_are_hidden(reader: ScriptedReader) -> None:
    """Broken if everybody on the machine could read names that `hide_other_users` hides."""
    text = json.dumps(view.picture({**reader.reply, "hides_names": True}, {1: "first.py"}))
    assert ".py" not in text
    assert '"client c1"' in text


def test_nothing_is_asked_while_nobody_looks(reader: ScriptedReader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if an open port cost the coordinator anything when no browser looks."""
    monkeypatch.setattr(live, "PAUSE_FACTOR", 0.0)

    async def look() -> None:
        shown = Live(reader, period_s=0.0)
        running = asyncio.create_task(shown.run())
        for _ in range(2):
            pictures = shown.join()
            assert pictures is not None
            await _next(pictures)
            await pictures.aclose()  # type: ignore[attr-defined]
            before = len(reader.asked)
            for _ in range(20):
                await asyncio.to_thread(int)  # as long as a question takes
            assert len(reader.asked) <= before + 1  # one may have been under way
        running.cancel()

    asyncio.run(look())


def test_browsers_are_bounded_and_slow_ones_leave(reader: ScriptedReader) -> None:
    """Broken: browsers that never read make the process grow, or keep every other user from looking."""

    async def look() -> None:
        shown = Live(reader, period_s=0.0)
        slow = [shown.join() for _ in range(live.MAX_BROWSERS)]
        another = shown.join()
        assert [text async for text in slow[0]] == [], "the oldest made room"
        running = asyncio.create_task(shown.run())
        assert (await _next(another))["whole"]
        running.cancel()

    asyncio.run(look())


@pytest.mark.parametrize(
    ("content", "mode", "complaint"),
    [
        ("x" * 15, 0o600, "at least 16"),
        ("x" * 2000, 0o600, "at least 16"),
        ("é" * 20, 0o600, "ASCII"),
        ("two lines of text\nare no token", 0o600, "one line"),
        ("x" * 32, 0o640, "chmod 600"),
        (None, 0, "No such file"),
    ],
)
def test_bad_token_files_are_refused(tmp_path: Path, content: str | None, mode: int, complaint: str) -> None:
    """Broken if a token that others read or guess let them change programs."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content, encoding="utf-8")
        file.chmod(mode)
    with pytest.raises(web_process.WebError, match=complaint):
        web_process.read_token(file)


def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken if a coordinator without the extra did not say how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(web_process.WebError, match=r"pip install .*starlette.* .*uvicorn"):
        web_process.check_installed()
