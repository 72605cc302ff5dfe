"""The style, executable: what a reviewer would otherwise have to say again and again.

Invariants: every check names the file and line that breaks it.  Non-goals: anything that runs the product.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from nvshare.coordinator.protocol import messages
from nvshare.coordinator.protocol.fields import Field

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("coordinator", "scheduler_policies", "client_hook", "simulated_gpu", "bench")
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *(path for name in ("bench", "charts", "docs") for path in (ROOT / name).rglob("*.md"))]
)


def python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def c_files() -> list[Path]:
    """Every C file that is written by hand."""
    folders = [ROOT / name for name in (*PACKAGES, "tests")]
    found = [path for folder in folders for path in sorted(folder.rglob("*.[ch]"))]
    return [path for path in found if ".gen." not in path.name]


def text_files() -> list[Path]:
    """Everything that people read."""
    kinds = {".py", ".c", ".h", ".def", ".md", ".toml", ".txt", ".sh", ".map", ".yaml", ".json"}
    roots = [path for path in ROOT.iterdir() if path.name not in {"build", "dist"} and not path.name.startswith(".")]
    found = [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*")))]
    return [*(path for path in found if path.is_file() and path.suffix in kinds), ROOT / ".ci" / "run"]


def where(path: Path, line: int) -> str:
    """`file:line`, relative to the checkout."""
    return f"{path.relative_to(ROOT)}:{line}"


@functools.cache
def tree(path: Path) -> ast.Module:
    """A file's syntax."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def nodes(path: Path) -> Iterator[ast.AST]:
    """All syntax nodes of a file."""
    return ast.walk(tree(path))


def lines_matching(pattern: str, paths: list[Path]) -> list[str]:
    """Places of a pattern."""
    wanted = re.compile(pattern)
    return [
        where(path, number)
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if wanted.search(line)
    ]


def test_c_files_say_their_purpose() -> None:
    """A C file begins with a comment that says what belongs there; ruff asks the same of Python."""
    bare = [
        str(path.relative_to(ROOT))
        for path in c_files()
        if not path.read_text(encoding="utf-8").lstrip().startswith(("/*", "//"))
    ]
    assert not bare, bare


def test_no_vague_names() -> None:
    """`utils` is where code goes to be forgotten."""
    vague = {"util", "utils", "helper", "helpers", "manager", "managers", "misc", "common"}
    paths = [*python_files(*PACKAGES, "tests"), *c_files()]
    found = [str(path.relative_to(ROOT)) for path in paths if vague & set(re.split(r"[_\W]+", path.stem.lower()))]
    found += [
        f"{where(path, node.lineno)} class {node.name}"
        for path in python_files(*PACKAGES)
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and re.search(r"(Manager|Helper|Utils?)$", node.name)
    ]
    assert not found, found


def test_nothing_is_left_for_later() -> None:
    """A note in the code is work that nobody tracks."""
    found = lines_matching(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|HA" + r"CK)\b", text_files())
    assert not found, found


def test_tests_say_what_would_be_broken() -> None:
    """One line a test: what its failure means."""
    bare = [
        f"{where(path, node.lineno)} {node.name}"
        for path in python_files("tests")
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and ast.get_docstring(node) is None
    ]
    assert not bare, bare


def test_no_path_of_one_machine() -> None:
    """A path that exists on one machine only works on one machine only."""
    roots = "|".join(("home", "root", "Users", "work", "workspace", "mnt"))
    found = lines_matching(rf"(?<![\w.$}}])/({roots})/[\w.]", text_files())
    assert not found, found


def test_atomics_name_their_order() -> None:
    """An atomic without its order is sequentially consistent by accident, and nobody has thought about its pair."""
    operations = "load|store|exchange|fetch_add|fetch_sub|fetch_or|fetch_and|fetch_xor|flag_test_and_set|flag_clear"
    written = [path for path in c_files() if not path.is_relative_to(ROOT / "tests")]
    implicit = rf"\batomic_({operations}|compare_exchange_weak|compare_exchange_strong)\s*\("
    assert not (found := lines_matching(implicit, written)), found
    assert not (found := lines_matching(r"__sync_\w+\s*\(", written)), found


def included(path: Path) -> set[str]:
    """Our own headers that a C file names."""
    return set(re.findall(r'^#include "([^"]+)"', path.read_text(encoding="utf-8"), re.MULTILINE))


def test_rooms_of_the_hook() -> None:
    """Who may know whom in C: the gate no wire, the lease nothing but messages, the transport only the agent."""
    source = ROOT / "client_hook" / "src"
    protocol = "coord/protocol"
    assert not included(source / "gate/gate.h") - {"base/hot.h"}
    machine = {name for kind in "ch" for name in included(source / protocol / f"lease_machine.{kind}")}
    assert machine == {f"{protocol}/wire.gen.h", f"{protocol}/lease_machine.h"}
    outside = [path for path in source.rglob("*.[ch]") if path.relative_to(source).parts[0] not in {"coord", "init.c"}]
    knowing = [path for path in outside if any(name.startswith(protocol) for name in included(path))]
    assert not knowing, knowing


def anchors(document: Path) -> set[str]:
    """The anchors of a document's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(document: Path, target: str) -> bool:
    """Whether a link of a document leads to a file, and to a heading if it names one."""
    path, _, anchor = target.partition("#")
    file = document.parent / path if path else document
    return file.exists() and (not anchor or anchor in anchors(file))


def test_each_decision_is_in_the_index() -> None:
    """Broken: a record that no page leads to is not found."""
    index = (ROOT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / "docs" / "decisions").glob("*.md")} - {"README.md"}
    assert not [name for name in sorted(names) if f"({name})" not in index]


def test_links_resolve() -> None:
    """A dead link in the documents sends the reader away."""
    dead = [
        f"{where(document, number)} {target}"
        for document in DOCUMENTS
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), start=1)
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", line)
        if "://" not in target and not resolves(document, target)
    ]
    assert not dead, dead


def test_changelog_is_kept() -> None:
    """Users read what changes for them before they upgrade."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    kinds = "Added|Changed|Fixed|Removed|Deprecated|Security"
    assert re.search(rf"^## \d+\.\d+\.\d+ \(unreleased\)\n+### ({kinds})\n+- ", text, re.MULTILINE)


def bounds_of(field: Field) -> str:
    """As the document has them; large ones are powers of two."""
    if field.most is None:
        return f"{field.kind} {field.size}"
    power = field.most.bit_length() - 1
    most = f"2^{power}" if power >= 16 and field.most == 1 << power else str(field.most)
    return f"{field.kind} {field.size}, {field.least} to {most}"


def test_protocol_document_is_complete() -> None:
    """Somebody who writes another client must find every message and field, with its number and bounds."""
    text = (ROOT / "docs" / "reference" / "protocol.md").read_text(encoding="utf-8")
    missing = []
    for table in (messages.TO_COORDINATOR, messages.TO_CLIENT):
        for number, message in table.items():
            heading = re.search(rf"^### {number} `{message.__name__}`$(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL)
            if heading is None:
                missing.append(f"{number} {message.__name__}")
                continue
            for bound, field in zip(message.LAYOUT, fields(message), strict=True):  # type: ignore[arg-type]
                if f"\n| `{field.name}` | {bounds_of(bound)} |" not in heading[1]:
                    missing.append(f"{message.__name__}.{field.name} ({bounds_of(bound)})")
    assert f"version {messages.PROTOCOL_VERSION}" in text
    assert not missing, missing


def environment_variables() -> dict[str, str]:
    """Every `NVSHARE_` variable that the product mentions as a whole string, and where."""
    literal = re.compile(r"NVSHARE_[A-Z0-9_]*[A-Z0-9]")
    found: dict[str, str] = {}
    for path in python_files(*PACKAGES):
        for node in nodes(path):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and literal.fullmatch(node.value):
                found.setdefault(node.value, where(path, node.lineno))
    for path in c_files():
        if path.is_relative_to(ROOT / "tests"):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for name in re.findall(r'"(NVSHARE_[A-Z0-9_]*[A-Z0-9])"', line):
                found.setdefault(name, where(path, number))
    return found


def test_every_variable_is_documented() -> None:
    """A variable that no document names is a trap."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    found = environment_variables()
    found.pop("NVSHARE_SIM", None)  # not a variable, but how several begin
    missing = {name: place for name, place in found.items() if not re.search(rf"\b{name}\b", text)}
    assert not missing, missing
