"""What others have left in the directories beside a rank's own: of another parallel size, or other block sizes.

Nothing is opened for writing here, and nothing is believed: an index that cannot be read is nobody's, and a form is
checked as everything is that comes from outside.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from asynckv.edges.file_index import INDEX, open_index
from asynckv.errors import AsyncKVError, LayoutError
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.kept import kept_tables
from asynckv.geometry.layout import Layout, fingerprint

__all__ = ["Left", "left_in"]

MAX_FOLDERS = 4096


class Left(NamedTuple):
    """One rank's directory.

    Attributes:
        num_bytes: Of its files.
        form: What a record in it is.
    """

    folder: Path
    num_bytes: int
    form: Layout


def left_in(directory: Path, own: Layout) -> Sequence[Left]:
    """Return the directories that a rank needs of another engine's; of several engines those of the one that ran last.

    Those of its own siblings are never among them: they are to open them themselves.
    """
    engines: dict[tuple[object, ...], list[tuple[float, Left]]] = defaultdict(list)
    with suppress(OSError):
        for folder in sorted(directory.iterdir())[:MAX_FOLDERS]:
            if (folder / INDEX).is_file():
                with suppress(OSError, sqlite3.Error, ValueError, AsyncKVError):
                    left = _read(folder)
                    engines[_engine(left.form)].append(((folder / INDEX).stat().st_mtime, left))
    engines.pop(_engine(own), None)
    if not engines:
        return ()
    newest = max(engines.values(), key=lambda ranks: max(at for at, _ in ranks))
    # Of a rank that changed its memory order there may be two.
    ranks = {(left.form.tp_rank, left.form.pp_stage): left for _, left in sorted(newest, key=lambda each: each[0])}
    try:
        tables = kept_tables(own, [left.form for left in ranks.values()], count(1))
    except LayoutError:
        return ()  # some are missing, or they hold something else
    return tuple(left for left, some in zip(ranks.values(), tables, strict=True) if some is not None)


def _engine(form: Layout) -> tuple[object, ...]:
    """What the ranks of one engine have in common."""
    return form.tp_size, form.pp_size, form.model, tuple((group.name, group.block_size) for group in form.groups)


def _read(folder: Path) -> Left:
    """Read what a directory says of itself.

    Raises:
        AsyncKVError: It makes no sense.
    """
    with closing(open_index(folder / INDEX, mode="ro")) as index:
        ((num_bytes,),) = index.execute("SELECT value FROM meta WHERE name = 'num_bytes'").fetchall()
        layouts = index.execute("SELECT fingerprint, body FROM layouts").fetchall()
    for name, body in layouts:
        form = decode_layout(bytes(body))
        check_layout(form)
        if fingerprint(form) == name and folder.name.endswith(name):
            return Left(folder, int(num_bytes), form)
    raise AsyncKVError(f"{folder} does not say what its records are")
