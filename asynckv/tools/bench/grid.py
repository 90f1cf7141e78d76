"""A grid of benchmark runs: which options vary, over which values, and what each point is called.

Knows the options of `asynckv bench` only through its command, so that an option added there can be swept at once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from asynckv.errors import ConfigError
from asynckv.tools.bench.journal import label
from asynckv.tools.bench.options import declared

OF_SINGLE_RUNS = {name for name, (_, option) in declared().items() if option.is_single}
"""What belongs to one run: its output, and a second machine that has to be there for it."""
MOST_POINTS = 10_000


@dataclass(frozen=True, slots=True)
class Point:
    """One run of a grid.

    Attributes:
        key: A digest of all parameters, defaults included: the same point has the same key in any sweep.
        argv: What follows `asynckv bench`.
        axes: Its place in the grid: option without dashes -> the value as written.
        params: Every parameter, after defaults.
    """

    key: str
    argv: tuple[str, ...]
    axes: dict[str, str]
    params: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """All points, the last axis varying fastest.

    Attributes:
        axes: The options with more than one value.
        files: Digests of the files that parameters name: another content is another sweep.
    """

    axes: dict[str, list[str]]
    points: list[Point]
    files: dict[str, str]


def values(text: str) -> list[str]:
    """Split a list: at semicolons if there are any, else at commas.

    Semicolons are for values that hold commas themselves: `128:0.8,8192:0.2;1024`, or `128:0.8,8192:0.2;` alone.
    Every list may end in its mark.

    Raises:
        ValueError: One of them is empty; says how to put that right.
    """
    mark, name = (";", "semicolon") if ";" in text else (",", "comma")
    found = [x.strip() for x in text.split(mark)]
    if not any(found):
        return []
    if not found[-1]:
        found.pop()
    if not all(found):
        raise ValueError(f"a value of the list is empty; take the extra {name} out")
    return found


def expand(command: Any, args: Sequence[str]) -> Grid:
    """Make the grid that these options span.

    Args:
        command: The click command of `asynckv bench`.
        args: Its options; a value may be a list.

    Raises:
        ConfigError: An option is unknown, repeated, empty or not for sweeps; or there are too many points.
        Exception: click's usage error, where one value is not what its option takes.
    """
    given = _options(command, args)
    if (size := math.prod(len(v) for v in given.values() if v is not None)) > MOST_POINTS:
        raise ConfigError(f"the sweep has {size} points, more than {MOST_POINTS}; shorten a list")
    names = list(given)
    points: list[Point] = []
    files: dict[str, str] = {}
    seen: dict[str, dict[str, str]] = {}
    for chosen in product(*(v if v is not None else [None] for v in given.values())):
        argv = [x for name, value in zip(names, chosen, strict=True) for x in (name, value) if x is not None]
        # Parsed and not run: wrong values are found before anything is measured.
        params = command.make_context("asynckv bench", list(argv)).params
        files |= _digests(params)
        plain = {k: str(v) if isinstance(v, Path) else v for k, v in sorted(params.items()) if k not in OF_SINGLE_RUNS}
        key = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]
        axes = {
            name.lstrip("-"): value
            for name, value in zip(names, chosen, strict=True)
            if value is not None and len(given[name] or ()) > 1
        }
        if key in seen:
            raise ConfigError(f"two points of the sweep are the same: {label(seen[key])} and {label(axes)}")
        seen[key] = axes
        points.append(Point(key, tuple(argv), axes, plain))
    return Grid({n.lstrip("-"): v for n, v in given.items() if v is not None and len(v) > 1}, points, files)


def _options(command: Any, args: Sequence[str]) -> dict[str, list[str] | None]:
    """Option -> its values, None for a flag."""
    context = command.context_class(command, info_name="asynckv bench")
    found, left, order = command.make_parser(context).parse_args(list(args))
    if left:
        raise ConfigError(f"{left[0]!r} is no option of asynckv bench; asynckv bench --help lists them")
    given: dict[str, list[str] | None] = {}
    for param in order:
        name, text = param.opts[0], found[param.name]
        if param.name in OF_SINGLE_RUNS:
            raise ConfigError(f"{name} is of single runs, not of sweeps, whose reports are the lines of --out")
        if name in given:
            raise ConfigError(f"{name} was given twice; an axis is one list, such as {name} 1,16,64")
        try:
            given[name] = None if param.is_flag else values(text)
        except ValueError as exc:
            raise ConfigError(f"{name} {text!r}: {exc}") from None
        if given[name] == []:
            raise ConfigError(f"{name} {text!r} holds no value")
    return given


def _digests(params: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for name, value in params.items():
        if not isinstance(value, Path) or name in OF_SINGLE_RUNS:
            continue
        path = value / "config.json" if value.is_dir() else value
        try:
            found[str(value)] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
        except OSError as exc:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {exc.strerror or exc}") from exc
    return found
