"""The command `boundby`: each of its words runs one file of the pipeline, the same that a checkout runs by its path.

Nothing is loaded here but what starts the file.
"""

import difflib
import runpy
import sys
from collections.abc import Sequence

import boundby
from boundby.cli import COMMANDS, PIPELINE

USAGE = 2
SHOWN = """usage: boundby COMMAND [arguments]

What is your model bound by, and what would fixing that gain?

{}

boundby COMMAND --help explains one; boundby --version; boundby --completion bash|zsh|fish"""
IN_PYTHON = "it is a call in Python: boundby.explain(model, batch); "
# `eval "$(boundby --completion bash)"`; the options of a word are read from its own help when they are asked for.
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
COMPLETIONS = {"bash": BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{BASH}", "fish": FISH}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the file that the first argument names with the others; return 2 for a word that is no command.

    The file ends the process itself, with its own exit code.
    """
    word, *rest = (sys.argv[1:] if arguments is None else list(arguments)) or ["--help"]
    if word in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print(SHOWN.format("\n".join(f"  {name:{width}}  {purpose}" for name, (_, purpose) in COMMANDS.items())))
        return 0
    if word in ("--version", "-V"):
        print(f"boundby {boundby.__version__}")
        return 0
    if word == "--completion":
        shell = rest[0] if len(rest) == 1 else ""
        if shell not in COMPLETIONS:
            print(f"boundby --completion takes one of {', '.join(COMPLETIONS)}", file=sys.stderr)
            return USAGE
        print(completion(shell))
        return 0
    if word not in COMMANDS:
        near = difflib.get_close_matches(word, COMMANDS, 1)
        meant = IN_PYTHON if word == "explain" else f"did you mean {near[0]}? " if near else ""
        print(f"boundby: there is no command {word!r}; {meant}known: {', '.join(COMMANDS)}", file=sys.stderr)
        return USAGE
    file = PIPELINE / COMMANDS[word][0]
    sys.argv = [f"boundby {word}", *rest]
    sys.path.insert(0, str(PIPELINE))
    runpy.run_path(str(file), run_name="__main__")
    return 0


def completion(shell: str) -> str:
    """Return the lines that teach `shell`, a key of `COMPLETIONS`, the words of the command and what each is for."""
    lines = (
        f"complete -c boundby -n __fish_use_subcommand -f -a {word} -d '{purpose}'"
        for word, (_, purpose) in COMMANDS.items()
    )
    return COMPLETIONS[shell].replace("@WORDS@", " ".join(COMMANDS)).replace("@LINES@", "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
