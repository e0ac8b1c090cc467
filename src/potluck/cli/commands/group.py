"""The group of commands: arguments keep their help under every click, and a word that is no command gets advice."""

import inspect
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from rich.markup import escape
from typer.core import TyperGroup
from typer.models import ParameterInfo

from potluck.cli.commands.advice import no_command
from potluck.core.ground.errors import ConfigError


class CommandGroup(TyperGroup):
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
            raise ConfigError(no_command(args, self.list_commands(ctx)))
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
