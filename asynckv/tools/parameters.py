"""Parameters of commands, made from the declarations in `asynckv.tools.bench.options`."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import typer

from asynckv.tools.bench.options import Option, Options, declared, flag

C = TypeVar("C", bound=Callable[..., Any])


def taking_options(command: C, *, names: Iterable[str] | None = None) -> C:
    """Give a command the parameters that `Option` declares, and for `**given` all options, or those that are named."""
    made: list[inspect.Parameter] = []
    hints = typing.get_type_hints(command, include_extras=True)
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is not inspect.Parameter.VAR_KEYWORD:
            kind, *extras = typing.get_args(hints[parameter.name]) or (hints[parameter.name],)
            option = next((x for x in extras if isinstance(x, Option)), None)
            hint = hints[parameter.name] if option is None else _typed(parameter.name, kind, option)
            made.append(parameter.replace(annotation=hint))
            continue
        defaults = Options()
        for name in declared() if names is None else names:
            kind, option = declared()[name]
            default = option.shown if option.read is not None else getattr(defaults, name)
            made.append(
                inspect.Parameter(
                    name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_typed(name, kind, option)
                )
            )
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in made}
    return command


def _typed(name: str, kind: Any, option: Option) -> Any:
    """Make an option's type for typer: what is read is text, and a flag has no opposite."""
    names = [flag(name)] if kind is bool else []
    shown = True if option.shown is None or option.read is not None else option.shown
    extra = typer.Option(
        *names, help=option.help, show_default=shown, metavar=option.metavar, rich_help_panel=option.panel
    )
    return Annotated[str if option.read is not None else kind, extra]


def options_given(given: Mapping[str, Any]) -> Options:
    """Make the options of what was given; the others have their defaults."""
    values = dict(given)
    for name in given:
        _, option = declared()[name]
        if option.read is not None:
            values[name] = option.read(flag(name), values[name])
    return Options(**values)
