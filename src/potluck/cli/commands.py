"""The group of commands: arguments keep their help under every click, and the usual slips get advice."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rich.markup import escape
from typer.core import TyperGroup
from typer.models import ParameterInfo

from potluck.core.ground.errors import ConfigError, nearest


class Commands(TyperGroup):
    """Typer's group, which explains arguments, and says what to type where no command was named."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command with the help of its arguments, or None."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            _explain_parameters(command)
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name.

        Raises:
            ConfigError: there is none; says what the user may have meant.
        """
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            raise ConfigError(_no_command(args, self.list_commands(ctx)))
        return super().resolve_command(ctx, args)


def _explain_parameters(command: Any) -> None:
    """Give arguments and options the help that their annotations state, with brackets that stand for themselves.

    Rich takes `[sweep]` for its markup. Typer before 0.21 loses arguments' help where click is so new that its own
    arguments have a help, which replaces typer's.
    """
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    for parameter in command.params:
        if (info := _info_in(hints.get(parameter.name))) is not None and info.help:
            parameter.help = escape(info.help)


def _info_in(hint: Any) -> ParameterInfo | None:
    stated = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((one for one in stated if isinstance(one, ParameterInfo)), None)


def _no_command(words: Sequence[str], commands: Sequence[str]) -> str:
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
