"""Output of commands: help texts, files, JSON and tables."""

from __future__ import annotations

import inspect
import io
import os
import sys
import tomllib
import typing
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from rich.markup import escape
from rich.measure import Measurement

from asynckv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console, JustifyMethod, RenderableType

C = TypeVar("C", bound=Callable[..., Any])
MOST_WIDE = 4096  # columns of a line in a file or pipe
HELP: Mapping[str, Mapping[str, str]]
HELP = tomllib.loads(files(__package__).joinpath("help.toml").read_text(encoding="utf-8"))
"""Texts of the commands' help: what stands behind the options of each command, and the options of some commands."""


def help_of(function: Callable[..., Any]) -> str:
    """Return a command's docstring without its line breaks, so that it fills the width of the terminal."""
    return "\n\n".join(" ".join(x.split()) for x in inspect.cleandoc(function.__doc__ or "").split("\n\n"))


def taking_options(command: C, declared: type, names: Iterable[str] | None = None) -> C:
    """Replace the `**given` of a command by the options that the fields of a class declare, or by those of `names`."""
    hints, kinds = typing.get_type_hints(command, include_extras=True), typing.get_type_hints(declared)
    found = {each.name: each for each in fields(declared)}
    annotated: Any = Annotated
    made = [x for x in inspect.signature(command).parameters.values() if x.kind is not inspect.Parameter.VAR_KEYWORD]
    made = [each.replace(annotation=hints[each.name]) for each in made]
    for name in found if names is None else names:
        hint = annotated[kinds[name], found[name].metadata["option"]]
        kind = inspect.Parameter.KEYWORD_ONLY
        made.append(inspect.Parameter(name, kind, default=found[name].default, annotation=hint))
    command.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in made}
    return command


def write(option: str, target: str, text: str) -> None:
    """Write to a file, or to stdout if the target is `-`."""
    if target == "-":
        # Output is UTF-8 even if the terminal has another encoding, because it is meant for files.
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
        return
    try:
        Path(target).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{option} {target}: cannot be written: {exc.strerror}") from exc


def consoles(json: str | None) -> tuple[Console, Console]:
    """Return the consoles of a command's results and of its progress.

    If stdout has the JSON, both discard all text, and Python's warnings are off: the only other output is errors.

    Raises:
        ConfigError: The file of `--json` cannot be written.
    """
    from rich.console import Console

    check_writable("--json", json)
    if is_alone := json == "-":
        warnings.simplefilter("ignore")
    return Console(quiet=is_alone, highlight=False), Console(stderr=True, quiet=is_alone, highlight=False)


def write_json(target: str | None, value: Any) -> None:
    if target is not None:
        write("--json", target, msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def check_writable(option: str, target: str | None) -> None:
    """Raise `ConfigError` before a run starts if `write` could not write to the target, which is left unchanged."""
    if target not in (None, "-"):
        path, is_new = Path(target), not os.path.lexists(target)
        try:
            path.open("a").close()
            if is_new:
                path.unlink()
        except OSError as exc:
            raise ConfigError(f"{option} {target}: cannot be written: {exc.strerror}") from exc


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    texts: Sequence[int] = (0,),
    wrapped: Sequence[int] = (),
    styles: Sequence[str] = (),
    is_markup: bool = False,
) -> None:
    """Print a table without cutting heads or numbers: it is made narrower, or else its lines exceed the width.

    The columns in `texts` are aligned left; those in `wrapped` hold words, and may be broken into lines.
    """
    from rich.table import Table

    def width(text: str, is_whole: bool) -> int:
        found = Measurement.get(console, console.options.update(width=MOST_WIDE), text)
        return found.maximum if is_whole else found.minimum

    safe = str if is_markup else escape
    kept = [i for i in range(len(heads)) if not i or heads[i] or any(row[i] for row in rows)]
    broken = [head.replace(" ", "\n").replace("-", "-\n") for head in heads]
    for chosen, gap in ((heads, 2), (broken, 2), (broken, 1)):
        table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
        for i in kept:
            head, is_left, is_whole = safe(chosen[i]), i in (*texts, *wrapped), i not in wrapped
            side: JustifyMethod = "left" if is_left else "right"
            least = max(width(text, is_whole) for text in (head, *(safe(row[i]) for row in rows)))
            table.add_column(head, justify=side, no_wrap=is_whole, overflow="fold", vertical="top", min_width=least)
        for row, style in zip_longest(rows, styles, fillvalue=""):
            table.add_row(*(safe(row[i]) for i in kept), style=style)
        needed = Measurement.get(console, console.options.update(width=MOST_WIDE), table).minimum
        if needed <= console.width:
            break
    else:
        table.width = needed
    console.print(table, highlight=False, crop=False)


def print_unpadded(console: Console, what: RenderableType, *, is_whole: bool = False) -> None:
    """Print a table; off a terminal without trailing spaces, and unfolded if `is_whole`."""
    from rich.console import Console

    if console.is_terminal:
        console.print(what, highlight=False)
        return
    text, width = io.StringIO(), MOST_WIDE if is_whole else console.width
    Console(file=text, width=width, color_system=None).print(what, highlight=False)
    for line in text.getvalue().removesuffix("\n").split("\n"):
        console.print(line.rstrip(), markup=False, highlight=False, soft_wrap=True)
