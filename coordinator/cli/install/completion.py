"""Shell completion: one script a shell for nvshare-run, nvshare-ctl and nvshare-coordinator.

The script completes nvshare-run, its options and the command behind it.  It asks the other two, which typer answers.
"""

from __future__ import annotations

import argparse

_BASH = """_nvshare_run() {{
    local word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${{COMP_WORDS[i]}} in
            --) ((i++)); break ;;
            {valued}) ((i++)); [[ ${{COMP_WORDS[i]}} == = ]] && ((i++)) ;;
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
    local option=${{COMP_WORDS[COMP_CWORD - 1]}}
    [[ $word == = ]] && word=
    [[ $option == = ]] && option=${{COMP_WORDS[COMP_CWORD - 2]}}
    case $option in
{choices}
        --runtime-dir) mapfile -t COMPREPLY < <(compgen -d -- "$word") ;;
        *) mapfile -t COMPREPLY < <(
            if [[ $word == -* ]]; then compgen -W "{options}" -- "$word"; else compgen -c -- "$word"; fi) ;;
    esac
}}
_nvshare_ask() {{
    local name=${{1##*/}}
    name=${{name^^}}
    mapfile -t COMPREPLY < <(
        env "COMP_WORDS=${{COMP_WORDS[*]}}" "COMP_CWORD=$COMP_CWORD" "_${{name//-/_}}_COMPLETE=complete_bash" "$1")
}}
complete -o filenames -F _nvshare_run nvshare-run
complete -o default -F _nvshare_ask nvshare-ctl nvshare-coordinator
"""

_ZSH = """#compdef nvshare-run nvshare-ctl nvshare-coordinator
_nvshare() {{
    if [[ $service != nvshare-run ]]; then
        local name="_${{${{service:u}}//-/_}}_COMPLETE"
        eval "$(env "_TYPER_COMPLETE_ARGS=${{words[1,CURRENT]}}" "$name=complete_zsh" "$words[1]")"
        return
    fi
    _arguments -S \\
{options}
        '(-)1:command:_command_names -e' \\
        '*::arguments:_normal'
}}
if [[ $funcstack[1] == _nvshare ]]; then # autoloaded from a directory of $fpath
    _nvshare "$@"
else
    compdef _nvshare nvshare-run nvshare-ctl nvshare-coordinator
fi
"""

_FISH = """function __nvshare_run_command --description 'the words of the command behind nvshare-run, if any'
    set -l words (commandline -opc) (commandline -ct)
    set -e words[1]
    while set -q words[1]
        switch $words[1]
            case --
                set -e words[1]
                break
            case {valued}
                set -e words[1]
                set -e words[1]
            case '-*'
                set -e words[1]
            case '*'
                break
        end
    end
    set -q words[1]; and printf '%s\\n' $words
end
complete -c nvshare-run -n __nvshare_run_command -x -a '(complete -C (__nvshare_run_command | string join " "))'
function __nvshare_ask --argument-names action
    set -l words (commandline -opc)
    set -l name (basename $words[1] | string upper | string replace -a - _)
    set -lx _TYPER_COMPLETE_FISH_ACTION $action
    set -lx _TYPER_COMPLETE_ARGS (commandline -cp)
    env _"$name"_COMPLETE=complete_fish $words[1]
end
for program in nvshare-ctl nvshare-coordinator
    complete -c $program -n '__nvshare_ask is-args' -f -a '(__nvshare_ask get-args)'
end
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
            if not _is_valued(action):
                value = ""
            elif name.startswith("--"):
                name += "="  # the value may stand behind "=" too
            lines.append(f"        '{name}[{_help(action)}]{value}' \\")
    return _ZSH.format(options="\n".join(lines))


def _fish(options: list[argparse.Action]) -> str:
    valued = [name for action in options if _is_valued(action) for name in action.option_strings]
    lines = []
    for action in options:
        for name in action.option_strings:
            kind = f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
            value = " -r" if _is_valued(action) else ""
            value = f" -x -a '{' '.join(action.choices)}'" if action.choices else value
            condition = "-n 'not __nvshare_run_command'"
            lines.append(f"complete -c nvshare-run {condition} {kind}{value} -d '{_help(action)}'")
    return _FISH.format(valued=" ".join(valued)) + "\n".join([*lines, ""])
