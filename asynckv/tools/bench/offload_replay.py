"""Replay a workload through an offload catalogue to find the hit rate of given tiers; no bytes are moved.

The catalogue decides as it does in an engine, and each move is reported as done at once. Requests run one after
another, so none of them meets a store that is still running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asynckv.core.events import Ending
from asynckv.errors import ConfigError, LayoutError
from asynckv.geometry.layout import Layout
from asynckv.geometry.packed import record_form, record_sizes
from asynckv.offload.catalogue import Catalogue
from asynckv.offload.job import JobEnded, JobKind, JobOutcome, MoveKind
from asynckv.offload.keys import StoredGroup, stored_groups
from asynckv.tools.bench.workload import Workload

MODEL = "bench"


class Tiers(NamedTuple):
    policy: str
    host_bytes: int
    file_bytes: int


class Prompts:
    """The requests of a workload, as an engine's scheduler sees them."""

    def __init__(self, workload: Workload, hash_tokens: int, align: int) -> None:
        self.workload, self.hash_tokens, self.align = workload, hash_tokens, align

    def __len__(self) -> int:
        return len(self.workload.prompt_tokens)

    def __iter__(self) -> Iterator[tuple[int, list[bytes], int]]:
        """Yield each request's length, the hashes of its whole blocks, and its leading tokens that were seen before."""
        seen = set[bytes]()
        for number, tokens in enumerate(self.workload.prompt_tokens):
            hashes = self.hashes(number)
            # The last token is always computed again.
            most = hashes[: (tokens - 1) // self.hash_tokens]
            known = next((i for i, key in enumerate(most) if key not in seen), len(most))
            yield tokens, hashes, known * self.hash_tokens // self.align * self.align
            seen.update(hashes)

    def hashes(self, number: int) -> list[bytes]:
        """Return a prompt's hashes: those within shared chunks depend on the chunk, the others on the request."""
        workload, size = self.workload, self.hash_tokens
        chunks = workload.chunks[number] if workload.chunks else ()
        places = np.arange(workload.prompt_tokens[number] // size)
        of = ((places + 1) * size - 1) // workload.chunk_tokens
        said = np.full((len(places), 2), -1 - number, "<i8")
        said[:, 1] = places
        shared = of < len(chunks)
        said[shared, 0] = np.array(chunks, np.int64)[of[shared]]
        raw = said.tobytes()
        return [raw[at : at + 16] for at in range(0, len(raw), 16)]


def kept_layout(layout: Layout, state_tokens: int) -> Layout:
    """Return a layout with states every `state_tokens` tokens, as an engine with prefix caching declares its groups."""
    groups = [msgspec.structs.replace(g, block_size=state_tokens) if g.kind == "state" else g for g in layout.groups]
    return msgspec.structs.replace(layout, groups=tuple(groups))


def groups_of(layout: Layout, hash_tokens: int) -> tuple[StoredGroup, ...]:
    """Return the groups of a rank as a catalogue needs them."""
    try:
        strides = [size.stride for size in record_sizes(record_form(layout))]
    except LayoutError as exc:
        raise ConfigError(f"these sizes make no layout: {exc}") from exc
    return tuple(group for group in stored_groups(layout, strides, hash_tokens, MODEL) if group.record_bytes)


def replay(
    prompts: Prompts, groups: Sequence[StoredGroup], tiers: Tiers, progress: Callable[[], None]
) -> dict[str, Any]:
    catalogue = Catalogue(groups, prompts.hash_tokens, tiers.host_bytes, tiers.file_bytes, policy=tiers.policy)
    tokens, moved = dict.fromkeys(("prompt", "host", "file", "computed", "best"), 0.0), dict.fromkeys(MoveKind, 0)
    for length, hashes, best in prompts:
        found, loaded = catalogue.lookup(hashes[: (length - 1) // prompts.hash_tokens]), 0
        if found.tokens:
            catalogue.load("load", hashes, found.tokens)
            if _carried_out(catalogue, moved, JobKind.LOAD).outcome is JobOutcome.DONE:
                loaded = found.tokens
        whole = len(hashes) * prompts.hash_tokens
        new = [range(loaded // group.block_size, whole // group.block_size) for group in groups]
        if any(new):
            catalogue.store("store", hashes, positions=new)
            _carried_out(catalogue, moved, JobKind.STORE)
        # If both tiers hold blocks of a prefix, each counts by its share of the bytes.
        pairs = list(zip(groups, found.groups, strict=True))
        file = sum(told.in_file * group.record_bytes for group, told in pairs)
        host = sum((told.ready + told.storing) * group.record_bytes for group, told in pairs)
        share = loaded / max(1, host + file)
        counts = {"prompt": length, "host": share * host, "file": share * file, "computed": length - loaded}
        for name, count in (counts | {"best": best}).items():
            tokens[name] += count
        progress()
    said, prompt = catalogue.statistics(), max(1.0, tokens["prompt"])
    rates = {name: tokens[name] / prompt for name in ("host", "file", "best")}
    rates["all"] = 1 - tokens["computed"] / prompt
    return {
        "tokens": {name: round(count) for name, count in tokens.items()},
        "hit_rate": {name: round(rate, 6) for name, rate in rates.items()},
        "evicted": {tier: said.get(f"{tier}_evicted", 0) for tier in ("host", "file")},
        "not_written_back": said["lost_before_write_back"] + said["write_backs_without_room"],
        "bytes": {kind.value: count for kind, count in moved.items()},
    }


def _carried_out(catalogue: Catalogue, moved: dict[MoveKind, int], kind: JobKind) -> JobEnded:
    """Report every move as done until none is left."""
    while moves := catalogue.moves(0.0):
        for move in moves:
            moved[move.kind] += move.num_bytes
            catalogue.ended(move.move_id, Ending.DONE)
    catalogue.forgotten()
    [told] = (each for each in catalogue.news() if isinstance(each, JobEnded) and each.kind is kind)
    return told
