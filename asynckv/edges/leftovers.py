"""What others have left in the directories beside a rank's own: of another parallel size, block size or memory order.

Nothing is opened for writing here, and nothing is believed: an index that cannot be read is nobody's, and a form is
checked as everything is that comes from outside.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from asynckv.edges.file_index import INDEX, open_index
from asynckv.errors import AsyncKVError
from asynckv.geometry.check import check_layout, decode_layout
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


def left_in(directory: Path, but: Path) -> Sequence[Left]:
    """Return the directories of all ranks of one engine; of several engines those of the one that ran last."""
    engines: dict[tuple[object, ...], list[tuple[float, Left]]] = defaultdict(list)
    with suppress(OSError):
        for folder in sorted(directory.iterdir())[:MAX_FOLDERS]:
            if folder == but or not (folder / INDEX).is_file():
                continue
            with suppress(OSError, sqlite3.Error, AsyncKVError):
                left = _read(folder)
                form = left.form
                sizes = tuple((group.name, group.block_size) for group in form.groups)
                at = (folder / INDEX).stat().st_mtime
                engines[form.tp_size, form.pp_size, form.model, sizes].append((at, left))
    if not engines:
        return ()
    newest = max(engines.values(), key=lambda ranks: max(at for at, _ in ranks))
    # Of a rank that changed its memory order there may be two.
    ranks = {(left.form.tp_rank, left.form.pp_stage): left for _, left in sorted(newest, key=lambda each: each[0])}
    return tuple(ranks.values())


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
