"""Manual pages in roff, made from the parsers of the programs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any, Final

_COMMON: Final = ("--json", "--runtime-dir", "--help", "-h")
"""Options of every command of nvshare-ctl."""


def parser_page(program: str, parser: argparse.ArgumentParser, version: str) -> str:
    """The page of a program that uses argparse."""
    usage = (parser.usage or "").removeprefix(f"{program} ")
    body = [*_options(_argparse_options(parser)), ".SH NOTES", _roff(parser.epilog or "")]
    return _page(program, version, parser.description or "", usage, body)


def command_page(program: str, command: Any, version: str) -> str:
    """The page of a program that uses typer."""
    usage = "COMMAND [options] [arguments]" if hasattr(command, "commands") else "[options]"
    body = [*_options(_click_options(command)), *_subcommands(command)]
    return _page(program, version, command.help or "", usage, body)


def _page(program: str, version: str, summary: str, usage: str, body: list[str]) -> str:
    head = [
        f'.TH {program.upper()} 1 "" "nvshare {version}" "nvshare"',
        ".SH NAME",
        f"{_roff(program)} \\- {_roff(summary.rstrip('.'))}",
        ".SH SYNOPSIS",
        f".B {_roff(program)}",
        _roff(usage),
    ]
    return "\n".join([*head, *body, ""])


def _argparse_options(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for action in parser._actions:
        value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
        yield ", ".join(action.option_strings) + value, (action.help or "").replace("%%", "%")


def _click_options(command: Any) -> Iterator[tuple[str, str]]:
    for parameter in command.get_params(command.context_class(command)):
        if parameter.param_type_name == "option" and not parameter.hidden:
            value = "" if parameter.is_flag else f" {parameter.metavar or parameter.name.upper()}"
            yield ", ".join(parameter.opts) + value, parameter.help or ""


def _options(options: Iterator[tuple[str, str]]) -> list[str]:
    return [".SH OPTIONS", *(line for name, text in options for line in (".TP", f".B {_roff(name)}", _roff(text)))]


def _subcommands(command: Any, before: str = "") -> list[str]:
    """The commands of a group and of its groups, with their arguments and own options."""
    lines = [] if before or not hasattr(command, "commands") else [".SH COMMANDS"]
    for name, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            lines += _subcommands(inner, f"{before}{name} ")
            continue
        arguments = [_argument(p) for p in inner.params if p.param_type_name == "argument"]
        options = [text for text, _ in _click_options(inner) if not text.startswith(_COMMON)]
        words = [f"{before}{name}", *arguments, *(f"[{text}]" for text in options)]
        lines += [".TP", f".B {_roff(' '.join(words))}", _roff(inner.help or "")]
    return lines


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _roff(text: str) -> str:
    """One line without roff's special characters."""
    line = " ".join(text.split()).replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{line}" if line[:1] in (".", "'") else line
