"""The directories of ranks, and those that engines of another parallel or block size have left beside a rank's own.

Each form of records has a directory of its own. A directory of another engine is only read, and never trusted: its form
is checked like all input from outside. One that cannot be used is reported with the cause, unless a process owns it,
because that process may be starting.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from asynckv.edges.files.index import INDEX, STORED_AT, read_index
from asynckv.edges.files.io import ALIGN
from asynckv.edges.files.store import owner_of
from asynckv.edges.folders import check_folder
from asynckv.errors import AsyncKVError, BackendError, LayoutError
from asynckv.geometry.check import check_layout, decode_layout
from asynckv.geometry.kept import kept_tables
from asynckv.geometry.layout import Layout, fingerprint

MAX_FOLDERS = 4096


class Left(NamedTuple):
    """One rank's directory: the bytes of its files, the form of its records, and the time it last stored something."""

    folder: Path
    num_bytes: int
    form: Layout
    stored_at: int


def rank_folder(directory: str | os.PathLike[str], form: Layout) -> Path:
    stage = f"-pp{form.pp_stage}of{form.pp_size}" if form.pp_size > 1 else ""
    return Path(directory) / f"tp{form.tp_rank}of{form.tp_size}{stage}-{fingerprint(form)}"


def left_in(directory: Path, own: Layout, left_out: list[str]) -> Sequence[Left]:
    """Return the directories that a rank needs, of the engine that stored last among those that left all of them.

    Directories of the rank's own siblings are skipped, because these open them themselves. For each directory that
    cannot be used and has no owner now, the reason is added to `left_out`.
    """
    mine, place = _engine(own), (own.tp_rank, own.pp_stage)
    engines: dict[tuple[object, ...], list[Left]] = defaultdict(list)
    for folder in _folders(directory):
        try:
            left = _read(folder)
        except AsyncKVError as exc:
            if not owner_of(folder)[1]:  # a live owner may be starting
                left_out.append(str(exc))
            continue
        if _engine(left.form) == mine and ((left.form.tp_rank, left.form.pp_stage) != place or left.form == own):
            continue
        engines[_engine(left.form)].append(left)
    for ranks in sorted(engines.values(), key=lambda ranks: -max(left.stored_at for left in ranks)):
        # A rank that changed its memory order may have left two.
        newest = {(left.form.tp_rank, left.form.pp_stage): left for left in sorted(ranks, key=lambda each: each[-1])}
        with suppress(LayoutError):  # some ranks are missing, or their records do not fit
            tables = kept_tables(own, [left.form for left in newest.values()], count(1))
            return tuple(left for left, some in zip(newest.values(), tables, strict=True) if some is not None)
    return ()


def _engine(form: Layout) -> tuple[object, ...]:
    shards = tuple((shard.group, shard.size, shard.interleave) for shard in form.token_shards or ())
    groups = tuple((group.name, group.block_size) for group in form.groups)
    return form.tp_size, form.pp_size, form.model, groups, shards


def _folders(directory: Path) -> Iterator[Path]:
    """Yield the directories that have an index, and those of ranks that this process may not look into."""
    with suppress(OSError):
        for folder in sorted(directory.iterdir())[:MAX_FOLDERS]:
            try:
                has_index = (folder / INDEX).is_file()
            except OSError:
                has_index = folder.name.startswith("tp")
            if has_index:
                yield folder


def _read(folder: Path) -> Left:
    check_folder(folder)
    said = read_index(folder, records=False)
    try:
        forms = [decode_layout(body) for body in said.layouts.values()]
        for each in forms:
            check_layout(each)
        form = next((form for form in forms if folder == rank_folder(folder.parent, form)), None)
        num_bytes = min(said.facts["num_bytes"], _end(folder, said.facts["segment_bytes"]))
    except (OSError, ValueError, LookupError, AsyncKVError) as exc:
        raise BackendError(f"the description of the records in {folder} makes no sense: {exc!r:.200}") from None
    if form is None:
        raise BackendError(f"{folder} does not say what its records are")
    if num_bytes < ALIGN:
        raise BackendError(f"{folder} has no files of blocks any more; asynckv offload prune --all removes it")
    return Left(folder, num_bytes, form, said.facts.get(STORED_AT, 0))


def _end(folder: Path, segment_bytes: int) -> int:
    """Return the end of the last file, whatever the index says; 0 if there is no file."""
    last = max(folder.glob("segment-*.kv"), default=None)
    return int(last.stem.removeprefix("segment-")) * segment_bytes + last.stat().st_size if last is not None else 0
