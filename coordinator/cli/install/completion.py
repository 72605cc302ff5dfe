"""Shell completion of nvshare-run: its options, then the command behind it.  Typer completes the other programs."""

from __future__ import annotations

import argparse

_BASH = """_nvshare_run() {{
    local word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            --) ((i++)); break ;;
            {valued}) ((i++)) ;;
            -*) ;;
            *) break ;;
        esac
    done
    word=${{COMP_WORDS[COMP_CWORD]}}
    if ((i < COMP_CWORD)) || {{ ((i == COMP_CWORD)) && [[ ${{COMP_WORDS[i - 1]}} == -- ]]; }}; then
        if declare -F _command_offset >/dev/null; then _command_offset "$i"; return; fi
        mapfile -t COMPREPLY < <(compgen -c -f -- "$word")
        return
    fi
    case ${{COMP_WORDS[COMP_CWORD - 1]}} in
{choices}
        --runtime-dir) mapfile -t COMPREPLY < <(compgen -d -- "$word") ;;
        *) mapfile -t COMPREPLY < <(
            if [[ $word == -* ]]; then compgen -W "{options}" -- "$word"; else compgen -c -- "$word"; fi) ;;
    esac
}}
complete -o filenames -F _nvshare_run nvshare-run
"""


def script(parser: argparse.ArgumentParser, shell: str) -> str:
    """The completion script for `bash`, `zsh` or `fish`."""
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](_options(parser))


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [action for action in parser._actions if action.option_strings]


def _is_valued(action: argparse.Action) -> bool:
    """Whether the next word is the option's value."""
    return action.nargs is None


def _help(action: argparse.Action) -> str:
    text = (action.help or "").replace("%%", "%")
    return "".join(character for character in text if character not in "[]:'\"\\`$")


def _bash(options: list[argparse.Action]) -> str:
    names = [name for action in options for name in action.option_strings]
    valued = [name for action in options if _is_valued(action) for name in action.option_strings]
    choices = [
        f'        {name}) mapfile -t COMPREPLY < <(compgen -W "{" ".join(action.choices)}" -- "$word") ;;'
        for action in options
        for name in action.option_strings
        if action.choices
    ]
    return _BASH.format(valued="|".join(valued), choices="\n".join(choices), options=" ".join(names))


def _zsh(options: list[argparse.Action]) -> str:
    lines = []
    for action in options:
        for name in action.option_strings:
            value = f":{action.dest}:({' '.join(action.choices)})" if action.choices else f":{action.dest}:"
            value = ":directory:_directories" if name == "--runtime-dir" else value
            lines.append(f"    '{name}[{_help(action)}]{value if _is_valued(action) else ''}' \\")
    command = ["    '(-)1:command:_command_names -e' \\", "    '*::arguments:_normal'"]
    return "\n".join(["#compdef nvshare-run", "_arguments -S \\", *lines, *command, ""])


def _fish(options: list[argparse.Action]) -> str:
    lines = ["complete -c nvshare-run -x -a '(__fish_complete_subcommand)'"]
    for action in options:
        for name in action.option_strings:
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            value = " -r" if _is_valued(action) else ""
            value = f" -x -a '{' '.join(action.choices)}'" if action.choices else value
            lines.append(f"complete -c nvshare-run {kind}{value} -d '{_help(action)}'")
    return "\n".join([*lines, ""])
