"""Where ranks keep their files, and what others have left beside a rank's own: of another parallel size, or block size.

Each form of records has a directory of its own. What others have left, and may be using still, is only read, and by
as many ranks as need it. Nothing is believed: an index that cannot be read is nobody's, a directory that somebody else
may write is left alone, and a form is checked as everything is that comes from outside.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from asynckv.edges.file_index import INDEX, STORED_AT, read_index
from asynckv.edges.file_store import check_folder, owner_of
from asynckv.errors import AsyncKVError, LayoutError
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.kept import kept_tables
from asynckv.geometry.layout import Layout, fingerprint

__all__ = ["Left", "left_in", "rank_folder"]

MAX_FOLDERS = 4096
SEGMENTS = "segment-*.kv"


class Left(NamedTuple):
    """One rank's directory.

    Attributes:
        num_bytes: Of its files.
        form: What a record in it is.
        stored_at: When something was stored there last.
    """

    folder: Path
    num_bytes: int
    form: Layout
    stored_at: int


def rank_folder(directory: str | os.PathLike[str], form: Layout) -> Path:
    """Say where a rank keeps its records of some form."""
    stage = f"-pp{form.pp_stage}of{form.pp_size}" if form.pp_size > 1 else ""
    return Path(directory) / f"tp{form.tp_rank}of{form.tp_size}{stage}-{fingerprint(form)}"


def left_in(directory: Path, own: Layout, left_out: list[str]) -> Sequence[Left]:
    """Return the directories that a rank needs of another engine's: of the one that stored last and left all of them.

    A rank's own siblings are never among them: they are to open their directories themselves. What an engine of its own
    size has left in another order of memory is each rank's own. What cannot be used, and is nobody's, is added to
    `left_out`, with the reason.
    """
    mine, place = _engine(own), (own.tp_rank, own.pp_stage)
    engines: dict[tuple[object, ...], list[Left]] = defaultdict(list)
    with suppress(OSError):
        for folder in sorted(directory.iterdir())[:MAX_FOLDERS]:
            with suppress(OSError):  # that of one is not to hide the others
                if not (folder / INDEX).is_file():
                    continue
                try:
                    left = _read(folder)
                except AsyncKVError as exc:
                    if not owner_of(folder)[1]:  # else it may be starting
                        left_out.append(str(exc))
                    continue
                if left is None:
                    continue
                if _engine(left.form) == mine:
                    if (left.form.tp_rank, left.form.pp_stage) != place or left.form == own:
                        continue
                engines[_engine(left.form)].append(left)
    for ranks in sorted(engines.values(), key=lambda ranks: -max(left.stored_at for left in ranks)):
        # Of a rank that changed its memory order there may be two.
        newest = {(left.form.tp_rank, left.form.pp_stage): left for left in sorted(ranks, key=lambda each: each[-1])}
        with suppress(LayoutError):  # some are missing, or they hold something else
            tables = kept_tables(own, [left.form for left in newest.values()], count(1))
            return tuple(left for left, some in zip(newest.values(), tables, strict=True) if some is not None)
    return ()


def _engine(form: Layout) -> tuple[object, ...]:
    """What the ranks of one engine have in common."""
    return form.tp_size, form.pp_size, form.model, tuple((group.name, group.block_size) for group in form.groups)


def _read(folder: Path) -> Left | None:
    """Read what a directory says of itself; None if all of its files are gone.

    Raises:
        AsyncKVError: It makes no sense, or is not to be trusted.
    """
    check_folder(folder)
    said, why = read_index(folder, records=False), ""
    try:
        for body in said.layouts.values():
            form = decode_layout(body)
            check_layout(form)
            if folder == rank_folder(folder.parent, form):
                if not any(folder.glob(SEGMENTS)):
                    return None
                num_bytes = min(said.facts["num_bytes"], _end(folder, said.facts["segment_bytes"]))
                return Left(folder, num_bytes, form, said.facts.get(STORED_AT, 0))
    except (ValueError, LookupError, LayoutError) as exc:
        why = f" ({exc})"
    raise AsyncKVError(f"{folder} does not say what its records are{why}; if nobody uses it any more, remove it")


def _end(folder: Path, segment_bytes: int) -> int:
    """Say where the last of its files ends, whatever the index says."""
    last = max(folder.glob(SEGMENTS))
    return int(last.stem.removeprefix("segment-")) * segment_bytes + last.stat().st_size
