"""What to type instead, after the usual slips: words that are no command, options that do not exist."""

from collections.abc import Sequence
from typing import Any

from potluck.core.ground.errors import nearest


def no_command(words: Sequence[str], commands: Sequence[str]) -> str:
    """What to type in place of words of which the first is no command."""
    first = words[0]
    if "=" in first or first.endswith((".toml", ".py")):
        return f"there is no command {first!r}; to run it: potluck run {' '.join(words)}"
    from potluck.cli.completion import methods

    if first in methods():
        return f"there is no command {first!r}, which is a method; to run it: potluck run {' '.join(words)}"
    return f"there is no command {first!r}; nearest: {', '.join(nearest(first, commands))}; all: potluck --help"


def option_advice(error: Exception, words: Sequence[str]) -> str:
    """The text of an error in a command's words; where an option does not exist, the key that may be meant.

    Args:
        error: click's.
        words: of the whole command line, without `potluck`.
    """
    option = getattr(error, "option_name", None)
    command = getattr(getattr(error, "ctx", None), "command", None)
    if option is None or command is None or _has(error, option):
        parameter = getattr(error, "param", None)
        nameless = str(error)[:1] == "'" or "is not in the range" in str(error)
        return f"{parameter.opts[0]}: {error}" if parameter is not None and nameless else str(error)
    known = getattr(error, "possibilities", None) or ()
    likely = f"; nearest option: {', '.join(sorted(known))}" if known else ""
    if not {"overrides", "what"} & {parameter.name for parameter in command.params}:
        said = " ".join(filter(None, ("potluck", command.name)))
        return f"{option}: `{said}` has no such option{likely}; all: {said} --help"
    return f"{option}: `potluck {command.name}` has no such option; {_instead(option, words)}{likely}"


def _has(error: Exception, option: str) -> bool:
    """Whether the option exists, so that the error is about its value."""
    command: Any = getattr(error.ctx, "command", None)  # type: ignore[attr-defined]
    return any(option in parameter.opts for parameter in command.params)


_MEANT = {"model": "models", "timeout": "deadline_s", "patience": "patience_s"}
"""Keys that have another name than the option that seems to mean them, or that was one in earlier versions."""


def _instead(option: str, words: Sequence[str]) -> str:
    """How to set what an option that does not exist seems to set."""
    from potluck.experiment.settings.strict import keys_called

    name = option.lstrip("-").replace("-", "_")
    value = _value_of(option, words)
    if name == "method":
        return f"a method is named without an option: potluck run {value or 'METHOD'}"
    found = keys_called(_MEANT.get(name, name))
    if not found:
        return "settings are keys, such as run.rounds=10; all: potluck show run, potluck show federation"
    meant = " or ".join(f"{key}={'VALUE' if value is None else value}" for key in found)
    return f"settings are keys: {meant}"


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The value that follows an option on the command line."""
    for word, after in zip(words, [*words[1:], None], strict=True):
        if word == option:
            return after if after is not None and not after.startswith("-") else None
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return None
