"""Completion of the command `boundby`: `eval "$(boundby --completion bash)"` in ~/.bashrc, the like in other shells.

Words are those of `boundby.cli.COMMANDS`; the options of one are read from its own help when they are asked for.
"""

OPTIONS = r"""boundby "$word" --help 2>/dev/null | grep -oE -e '--[a-z][a-z-]*' | sort -u"""
BASH = f"""_boundby() {{
    local typed=${{COMP_WORDS[COMP_CWORD]}} word=${{COMP_WORDS[1]}}
    if ((COMP_CWORD == 1)); then COMPREPLY=($(compgen -W "@WORDS@ --help --version" -- "$typed"))
    elif [[ $typed == -* ]]; then COMPREPLY=($(compgen -W "$({OPTIONS})" -- "$typed"))
    fi
}}
complete -o default -F _boundby boundby"""
FISH = f"""complete -c boundby -n __fish_use_subcommand -f -l help -l version
@LINES@
complete -c boundby -n 'not __fish_use_subcommand; and string match -q -- "-*" (commandline -ct)' \\
    -a '(set word (commandline -opc)[2]; {OPTIONS.replace("'", '"')})'"""
SCRIPTS = {"bash": BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}", "fish": FISH}


def script(shell: str, purposes: dict[str, str]) -> str:
    """Return the lines that teach `shell`, a key of `SCRIPTS`, the words of the command and what each is for."""
    lines = (f"complete -c boundby -n __fish_use_subcommand -f -a {word} -d '{purposes[word]}'" for word in purposes)
    return SCRIPTS[shell].replace("@WORDS@", " ".join(purposes)).replace("@LINES@", "\n".join(lines))
