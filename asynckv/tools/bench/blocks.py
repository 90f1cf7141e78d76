"""The block ids of one wave, chosen as an engine's scheduler and prefix cache would choose them.

Requests that one engine lends share the blocks that hold the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from asynckv.tools.bench.experiment import Experiment
from asynckv.tools.bench.schedule import Place, Request
from asynckv.tools.plan.layouts import model_groups
from asynckv.tools.plan.models import State

Lists = list[tuple[int, list[int | None]]]


class Allocation(NamedTuple):
    request: Request
    lent: Lists
    pulled: Lists


class Allocator:
    def __init__(
        self, num_blocks: Mapping[str, Sequence[int]], experiment: Experiment, rng: np.random.Generator | None = None
    ) -> None:
        self._experiment = experiment
        self._shareable = [not isinstance(layer, State) for layer, _ in model_groups(experiment.model)]
        self._free: dict[Place, list[list[int]]] = {}
        for place in experiment.engines.places:
            pools = self._free[place] = []
            for blocks in num_blocks[place.role]:
                ids = np.arange(blocks)
                if rng is not None:
                    rng.shuffle(ids)
                pools.append(ids[::-1].tolist())
        self._shared: dict[tuple[Place, int, int, int], int] = {}
        self.num_lent = self.num_shared = 0
        """Number of places that were lent, and of those that reuse a block already lent to another request."""

    def take(self, request: Request) -> Allocation | None:
        """Give a request its blocks on both engines; return None, and take nothing, if they do not fit."""
        lent_at = self._experiment.places(request.lender.role, request.tokens, 0)
        pulled_at = self._experiment.places(request.reader.role, request.tokens, request.cached)
        keys = [self._keys(request, g, there) for g, (_, there) in enumerate(lent_at)]
        prefill = [sum(k is None or k not in self._shared for k in ks) for ks in keys]
        decode = [sum(there) for _, there in pulled_at]
        for place, needs in ((request.lender, prefill), (request.reader, decode)):
            if any(need > len(free) for need, free in zip(needs, self._free[place], strict=True)):
                return None
        lent: Lists = []
        for pool, (first, there), ks in zip(self._free[request.lender], lent_at, keys, strict=True):
            known = iter(ks)
            lent.append((first, [self._lend(pool, next(known)) if is_there else None for is_there in there]))
        pulled: Lists = [
            (first, [pool.pop() if is_there else None for is_there in there])
            for pool, (first, there) in zip(self._free[request.reader], pulled_at, strict=True)
        ]
        return Allocation(request, lent, pulled)

    def _lend(self, pool: list[int], key: tuple[Place, int, int, int] | None) -> int:
        self.num_lent += 1
        if key is None:
            return pool.pop()
        if key in self._shared:
            self.num_shared += 1
        else:
            self._shared[key] = pool.pop()
        return self._shared[key]

    def _keys(self, request: Request, group: int, there: Sequence[bool]) -> list[tuple[Place, int, int, int] | None]:
        """Return the key by which requests share each block; None for a block with tokens outside shared chunks."""
        size = self._experiment.sides[request.lender.role].block_size
        chunk_tokens, out = self._experiment.workload.chunk_tokens, []
        for i, is_there in enumerate(there):
            if is_there:
                end = (i + 1) * size
                chunk = (end - 1) // chunk_tokens
                is_shared = self._shareable[group] and end <= request.tokens and chunk < len(request.chunks)
                out.append((request.lender, group, i, request.chunks[chunk]) if is_shared else None)
        return out
