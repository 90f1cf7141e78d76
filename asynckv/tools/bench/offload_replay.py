"""The share of a workload's prompts that tiers of some sizes would find again: the catalogue alone, without bytes.

The catalogue decides as it does in an engine; its moves are carried out by saying that they are done. Requests come
one after another, so no request finds what is being stored just now.
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
from asynckv.offload.found import Found
from asynckv.offload.job import JobEnded, JobKind, JobOutcome, MoveKind
from asynckv.offload.keys import StoredGroup, needed, stored_groups
from asynckv.tools.bench.schedule import PrefixCache
from asynckv.tools.bench.workload import Workload

MODEL = "bench"


class Tiers(NamedTuple):
    policy: str
    host_bytes: int
    file_bytes: int


class Prompt(NamedTuple):
    """One request: its length, the hashes of its whole blocks, and the leading tokens that the accelerator has of it.

    `most` are the leading tokens that any request before it had in common with it: what no cache exceeds.
    """

    tokens: int
    hashes: list[bytes]
    cached: int
    most: int


class Prompts:
    """A workload's requests, as an engine's scheduler sees them."""

    def __init__(self, workload: Workload, hash_tokens: int, align: int, cache_tokens: int = 0) -> None:
        self.workload, self.hash_tokens, self.align = workload, hash_tokens, align
        self._cache_blocks = cache_tokens // hash_tokens

    def __len__(self) -> int:
        return len(self.workload.prompt_tokens)

    def __iter__(self) -> Iterator[Prompt]:
        cache, seen = PrefixCache(self._cache_blocks), set[bytes]()
        for number, tokens in enumerate(self.workload.prompt_tokens):
            hashes = self.hashes(number)
            # The last token is computed again in any case.
            most = (tokens - 1) // self.hash_tokens
            cached = min(cache.num_cached(hashes), most) * self.hash_tokens // self.align * self.align
            known = next((i for i, key in enumerate(hashes[:most]) if key not in seen), min(most, len(hashes)))
            yield Prompt(tokens, hashes, cached, known * self.hash_tokens // self.align * self.align)
            seen.update(hashes)
            if self._cache_blocks:
                cache.use(hashes)

    def hashes(self, number: int) -> list[bytes]:
        """Hash a prompt: what is of a chunk that others have as well is called by it, the rest by the request."""
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


class Tally:
    def __init__(self, groups: Sequence[StoredGroup]) -> None:
        self.groups = groups
        self.tokens = dict.fromkeys(("prompt", "device", "host", "file", "computed", "best"), 0.0)
        self._alone = [0] * len(groups)
        self._blocks = [dict.fromkeys(("host", "file"), 0) for _ in groups]

    def count(self, prompt: Prompt, found: Found, loaded: int) -> None:
        at_hand = max(loaded, prompt.cached)
        self.tokens["prompt"] += prompt.tokens
        self.tokens["device"] += prompt.cached
        self.tokens["computed"] += prompt.tokens - at_hand
        self.tokens["best"] += max(prompt.most, prompt.cached)
        for at, told in enumerate(found.groups):
            self._alone[at] += told.tokens
        if loaded <= prompt.cached:
            return
        bytes_of = {"host": 0, "file": 0}
        for group, blocks, told in zip(self.groups, self._blocks, found.groups, strict=True):
            for tier, number in (("host", told.ready + told.storing), ("file", told.in_file)):
                blocks[tier] += number
                bytes_of[tier] += number * group.record_bytes
        share = bytes_of["file"] / max(1, sum(bytes_of.values()))
        self.tokens["file"] += (loaded - prompt.cached) * share
        self.tokens["host"] += (loaded - prompt.cached) * (1 - share)

    def told(self) -> dict[str, Any]:
        tokens = {name: round(count) for name, count in self.tokens.items()}
        prompt = max(1, tokens["prompt"])
        return {
            "tokens": tokens,
            "hit_rate": {name: round(tokens[name] / prompt, 6) for name in ("device", "host", "file")}
            | {"all": round(1 - tokens["computed"] / prompt, 6), "best": round(tokens["best"] / prompt, 6)},
            "groups": [
                {"name": group.name, "hit_rate": round(alone / prompt, 6), "blocks": blocks}
                for group, alone, blocks in zip(self.groups, self._alone, self._blocks, strict=True)
            ],
        }


def kept_layout(layout: Layout, state_tokens: int) -> Layout:
    """Let states be kept every so many tokens: an engine with prefix caching declares its groups so."""
    groups = [msgspec.structs.replace(g, block_size=state_tokens) if g.kind == "state" else g for g in layout.groups]
    return msgspec.structs.replace(layout, groups=tuple(groups))


def groups_of(layout: Layout, hash_tokens: int) -> tuple[StoredGroup, ...]:
    """Say what a catalogue has to know of a rank's groups."""
    try:
        strides = [size.stride for size in record_sizes(record_form(layout))]
    except LayoutError as exc:
        raise ConfigError(f"these sizes make no layout: {exc}") from exc
    return tuple(group for group in stored_groups(layout, strides, hash_tokens, MODEL) if group.record_bytes)


def replay(
    prompts: Prompts, groups: Sequence[StoredGroup], tiers: Tiers, progress: Callable[[], None]
) -> dict[str, Any]:
    """Play all requests; a run of the report."""
    catalogue = Catalogue(groups, prompts.hash_tokens, tiers.host_bytes, tiers.file_bytes, policy=tiers.policy)
    tally, moved = Tally(groups), dict.fromkeys(MoveKind, 0)
    for prompt in prompts:
        found = catalogue.lookup(prompt.hashes[: (prompt.tokens - 1) // prompts.hash_tokens])
        loaded = 0
        if found.tokens > prompt.cached:
            wanted = [needed(group, prompt.cached, found.tokens) for group in groups]
            catalogue.load("load", prompt.hashes, found.tokens, positions=wanted)
            if _carried_out(catalogue, moved, JobKind.LOAD).outcome is JobOutcome.DONE:
                loaded = found.tokens
        first = max(loaded, prompt.cached)
        whole = len(prompt.hashes) * prompts.hash_tokens
        new = [range(first // group.block_size, whole // group.block_size) for group in groups]
        if any(new):
            catalogue.store("store", prompt.hashes, positions=new)
            _carried_out(catalogue, moved, JobKind.STORE)
        tally.count(prompt, found, loaded)
        progress()
    said = catalogue.statistics()
    return tally.told() | {
        "blocks": {tier: said.get(f"{tier}_blocks", 0) for tier in ("host", "file")},
        "evicted": {tier: said.get(f"{tier}_evicted", 0) for tier in ("host", "file")},
        "not_written_back": said["lost_before_write_back"] + said["write_backs_without_room"],
        "bytes": {kind.value: count for kind, count in moved.items()},
    }


def _carried_out(catalogue: Catalogue, moved: dict[MoveKind, int], kind: JobKind) -> JobEnded:
    """Say of all moves that they are done, until there are none."""
    while moves := catalogue.moves(0.0):
        for move in moves:
            moved[move.kind] += move.num_bytes
            catalogue.ended(move.move_id, Ending.DONE)
    catalogue.forgotten()
    [told] = (each for each in catalogue.news() if isinstance(each, JobEnded) and each.kind is kind)
    return told
