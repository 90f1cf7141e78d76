"""Inspects and removes directories of stored blocks, without NIXL.

Inspecting changes nothing and takes no lock. Pruning writes, and is refused while a process owns the directory.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from msgspec import Struct

from asynckv.edges.files.index import INDEX, DamagedIndex, Said, read_index
from asynckv.edges.files.io import ALIGN
from asynckv.edges.files.store import OWNER, Owner, OwnerLock, owner_of
from asynckv.edges.folders import explained
from asynckv.errors import BackendError, ConfigError
from asynckv.tools.console import grouped

SEGMENTS = "segment-?????.kv"
RANK = re.compile(r"tp\d+of\d+|vllm-")


class Kind(Struct, frozen=True):
    tag: str
    layout: str
    blocks: int
    bytes: int


class Folder(Struct, frozen=True, kw_only=True):
    schema: str = "asynckv.offload.inspect/1"
    folder: str
    owner: Owner | None
    is_live: bool
    num_bytes: int  # bytes of the range that the last owner divided into slots
    segments: int
    bytes_on_disk: int
    blocks: int
    bytes_stored: int
    oldest: str
    newest: str
    malformed: int
    kinds: tuple[Kind, ...]


class Pruned(Struct, frozen=True, kw_only=True):
    schema: str = "asynckv.offload.prune/1"
    folder: str
    blocks: int
    bytes_freed: int
    removed: bool = False
    left: tuple[str, ...] = ()


def folders_in(path: Path) -> list[Path]:
    """Return the path if it holds stored blocks itself, or else all directories in it that do."""
    try:
        if _is_one(path):
            return [path]
        found = [each for each in sorted(path.iterdir()) if _is_one(each)]
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path} is not a directory; give that of one rank, or the one above it") from None
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {explained(path, exc)}") from None
    if not found:
        raise ConfigError(f"{path} holds no stored blocks; give the directory of one rank, or the one above it")
    return found


def _is_one(path: Path) -> bool:
    if not path.is_dir():
        return False
    try:
        return (path / INDEX).exists() or any(path.glob(SEGMENTS))
    except PermissionError:
        return RANK.match(path.name) is not None  # `look` reports that it cannot be read


def look(folder: Path) -> Folder:
    said = _said(folder)
    owner, is_live = owner_of(folder)
    sizes = grouped(((x.tag, x.layout), x.size) for x in said.entries)
    segments = list(folder.glob(SEGMENTS))
    return Folder(
        folder=str(folder),
        owner=owner,
        is_live=is_live,
        num_bytes=said.facts.get("num_bytes", 0),
        segments=len(segments),
        bytes_on_disk=sum(map(_on_disk, segments)),
        blocks=len(said.entries),
        bytes_stored=sum(x.size for x in said.entries),
        oldest=_when(min((entry.stored_at for entry in said.entries), default=0)),
        newest=_when(max((entry.stored_at for entry in said.entries), default=0)),
        malformed=len(said.malformed),
        kinds=tuple(Kind(*kind, len(found), sum(found)) for kind, found in sorted(sizes.items())),
    )


def prune_folder(folder: Path) -> Pruned:
    """Remove all files that a file tier has made, even damaged ones."""
    lock, blocks = OwnerLock(folder, visit=True), 0
    try:
        with suppress(BackendError):
            said = read_index(folder)
            blocks = len(said.entries) + len(said.malformed)
        files = [*folder.glob(SEGMENTS), *folder.glob(f"{INDEX}*"), *folder.glob("direct-*.tmp")]
        freed = sum(map(_on_disk, files))
        for path in files:
            path.unlink()
        (folder / OWNER).unlink(missing_ok=True)
        left = tuple(sorted(path.name for path in folder.iterdir()))
        if not left:
            folder.rmdir()
    except OSError as exc:
        raise BackendError(f"{folder} cannot be written: {explained(folder, exc)}") from None
    finally:
        lock.release()
    return Pruned(folder=str(folder), blocks=blocks, bytes_freed=freed, removed=not left, left=left)


def _said(folder: Path) -> Said:
    """Read an index without changing it; raise `BackendError` if it is missing or damaged."""
    path = folder
    try:
        os.scandir(path).close()
        path = folder / INDEX
        path.open("rb").close()
    except FileNotFoundError:
        raise BackendError(
            f"{folder} has no index, so no blocks are found in its {len(list(folder.glob(SEGMENTS)))} files; the next "
            f"start makes a new one and begins empty, and prune --all removes them"
        ) from None
    except OSError as exc:
        raise BackendError(f"{path} cannot be read: {explained(path, exc)}") from None
    said = read_index(folder)
    if said.entries and said.facts.get("segment_bytes", 0) < ALIGN:
        raise DamagedIndex(folder, "it does not give the length of its files")
    return said


def _on_disk(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0


def _when(seconds: int) -> str:
    with suppress(OverflowError, ValueError, OSError):
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds") if seconds else "never"
    return "at no sensible time"
