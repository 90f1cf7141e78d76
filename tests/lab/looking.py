"""What second looks of simulated readers must have seen: judged by the owners' blocks, whatever a reader compares.

Each byte of a block has coordinates `[block, layer, head, kv, token, byte]`, in the memory of either side. When a piece
of a look lands, the world's owner is asked what the block holds there. What a pull publishes has to be that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from asynckv.core import decode as decode_module
from asynckv.core.pull import Pull
from asynckv.core.types import Reason
from asynckv.testing.fabric import Bytes, Transfer
from tests.lab.script import BLOCK, Looks

Ints = npt.NDArray[np.int64]
NOT_SEEN = -1


@contextmanager
def few_places(looks: Looks | None) -> Iterator[None]:
    """Let as many looks of a rank run at a time as a service has them."""
    module = vars(decode_module)
    before = module["NUM_PLACES"]
    if looks is not None:
        module["NUM_PLACES"] = looks.num_places
    try:
        yield
    finally:
        module["NUM_PLACES"] = before


def offsets(array: Bytes, memory: Bytes) -> Ints:
    """Return where in a memory the bytes of an array of it lie."""
    at: Ints = np.array([array.__array_interface__["data"][0] - memory.__array_interface__["data"][0]], np.int64)
    for size, stride in zip(array.shape, array.strides, strict=True):
        at = (at[:, None] + np.arange(size) * stride).ravel()
    return at


def coordinates(view: Bytes, memory: Bytes) -> Ints:
    """Return the coordinates of each byte of a memory, all of which a view orders."""
    out = np.empty((len(memory), view.ndim), np.int64)
    out[offsets(view, memory)] = np.stack(np.unravel_index(np.arange(view.size), view.shape), axis=1)
    return out


@dataclass(slots=True, eq=False)
class _OfRank:
    """What a pull has read from one rank of the owner, by our block, and so on."""

    read: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.int16]
    """What the owner had there at the second look, as it came here; `NOT_SEEN` before."""


@dataclass(slots=True, eq=False)
class _OfPull:
    pull: Pull
    num_skipped: int
    """Looks that its engine had gone without before."""
    ranks: dict[str, _OfRank] = field(default_factory=dict)


class Filling:
    """The blocks that attempts of one request fill, on one rank.

    Args:
        rank: The rank.
        lent: The request, as its owner lent it.
        first: First token that is wanted.
        blocks: The rank's blocks.
    """

    def __init__(self, rank: Any, lent: Any, first: int, blocks: Sequence[int]) -> None:
        self.rank, self.lent, self.blocks = rank, lent, list(blocks)
        self.skipped = first // BLOCK
        self.pulls: dict[str, _OfPull] = {}
        self.flipped: dict[int, set[int]] = defaultdict(set)
        """Values of bytes that were changed on their way, by offset in our memory."""
        shape = (len(blocks), *rank.bytes.shape[1:])
        self.wanted = np.zeros(shape, np.bool_)
        for place in range(len(blocks)):
            for at, token in enumerate(rank.tokens):
                is_wanted = first <= (self.skipped + place) * BLOCK + token < lent.ask.tokens
                self.wanted[place, :, :, :, at] = is_wanted

    def posts(self, pull: Pull) -> _OfPull:
        """A read or a look of a pull is posted."""
        if others := [each for each in self.pulls.values() if each.pull.reason is Reason.DIFFERS]:
            self.rank.service.world.violate(
                f"{self.rank.process.name} reads {pull.request_id} again, of which bytes differed in "
                f"{others[0].pull.pull_id}"
            )
        return self.pulls.setdefault(pull.pull_id, _OfPull(pull, self._num_skipped))

    @property
    def _counters(self) -> Counter[str]:
        counters: Counter[str] = self.rank.engine._driver.core.outbox.counters
        return counters

    @property
    def _num_skipped(self) -> int:
        return self._counters["looks.skipped"]

    def landed(self, of: _OfPull, owner: Any, transfer: Transfer, pieces: range, flip_p: float) -> None:
        """Some pieces have landed, or were placed."""
        rank, rng = self.rank, self.rank.service.world.random_of("flip", self.rank.process.name, transfer.transfer_id)
        targets = [each for each, _ in transfer.places or transfer.pieces]
        mine = transfer.ours or targets
        if not pieces:
            return
        at = np.concatenate([offsets(mine[i], rank.memory) for i in pieces])
        block, layer, head, kv, token, byte = rank.coordinates[at].T
        where = np.full(len(rank.bytes), -1)
        where[self.blocks] = range(len(self.blocks))
        if transfer.ours and (where[block] < 0).any():
            return  # its request has ended, and the blocks are others'
        here = where[block], layer, head, kv, token, byte
        if owner.name not in of.ranks:
            of.ranks[owner.name] = _OfRank(np.zeros_like(self.wanted), np.full(self.wanted.shape, NOT_SEEN, np.int16))
        mask = 0
        if rng.random() < flip_p:
            mask, piece = 1 << rng.randrange(8), rng.choice(pieces)
            index = tuple(rng.randrange(size) for size in targets[piece].shape)
            targets[piece][index] ^= mask
            flipped = int(offsets(mine[piece], rank.memory)[np.ravel_multi_index(index, targets[piece].shape)])
            self.flipped[flipped].add(int(targets[piece][index]))
            rank.service.outcomes["flips.look" if transfer.ours else "flips.read"] += 1
        if not transfer.ours:
            of.ranks[owner.name].read[here], of.ranks[owner.name].seen[here] = True, NOT_SEEN
            return
        tokens = np.array([owner.tokens.index(t) if t in owner.tokens else -1 for t in rank.tokens])[token]
        theirs, heads = np.array(self.lent.blocks)[self.skipped + where[block]], head + rank.held[0] - owner.held[0]
        if (tokens < 0).any() or (heads < 0).any() or (heads >= owner.bytes.shape[2]).any():
            rank.service.world.violate(f"{rank.process.name} looks for what {owner.name} does not hold")
            return
        layers = list(owner.layers).index(rank.layers[0])
        found = owner.bytes[theirs, layers, heads, kv, tokens, byte].astype(np.int16)
        if mask:
            found[at == flipped] ^= mask
        of.ranks[owner.name].seen[here] = found

    def _differing(self, of: _OfPull) -> npt.NDArray[np.bool_]:
        ours, differ = self.rank.bytes[self.blocks], np.zeros_like(self.wanted)
        for each in of.ranks.values():
            differ |= self.wanted & (each.seen != NOT_SEEN) & (each.seen != ours)
        return differ

    def wrong_in_complete(self, pull_id: str, looks: Looks) -> str:
        """Say what a pull that is complete should not have published, or has not looked at."""
        of = self.pulls.get(pull_id)
        if of is None:
            return ""  # nothing was wanted
        if (differ := np.argwhere(self._differing(of))).size:
            return f"published bytes that had changed at its second look: {self._say(differ[0])}"
        if self._num_skipped > of.num_skipped and self._counters["transfers.detached"]:
            self.rank.service.outcomes["looks.skipped"] += 1
            return ""  # looks that hang had all places
        has_looked = any((each.seen != NOT_SEEN).any() for each in of.ranks.values())
        if looks.share < 1 and not has_looked:
            return ""
        for name, each in of.ranks.items():
            read = self.wanted & each.read
            if looks.most == "all":
                missed = read & (each.seen == NOT_SEEN)
            else:
                # Of each part the last tokens that this rank has given.
                missed = np.zeros_like(read)
                for kv in range(2):
                    last = np.argwhere(read[:, :, :, kv].any((1, 2, 4)))
                    if last.size:
                        place, at = last[-1]
                        seen = each.seen[place, :, :, kv, at] != NOT_SEEN
                        missed[place, :, :, kv, at] = not seen.any()
            if missed.any():
                return f"has not looked again at what {name} lent: {self._say(np.argwhere(missed)[0])}"
        return ""

    def wrong_in_difference(self, pull_id: str) -> str:
        """Say why bytes should not have been found to differ."""
        of = self.pulls.get(pull_id)
        if of is None or not (differ := np.argwhere(self._differing(of))).size:
            return "was told that bytes differ, and all that it has read again is the same"
        if not any(self._is_changed(place) for place in differ):
            return f"was told that bytes differ which nothing has changed while they were lent: {self._say(differ[0])}"
        return ""

    def _is_changed(self, place: Ints) -> bool:
        return bool(self.flipped.get(self._offset(place)) or self._scribbles(place))

    def _scribbles(self, place: Ints) -> set[int]:
        block, _, head, kv, token, byte = place.tolist()
        content = self.lent.contents[self.skipped + block]
        where = content, self.rank.layers[0], head + self.rank.held[0], kv, self.rank.tokens[token], byte
        found: set[int] = self.rank.service.scribbled.get(where, set())
        return found

    def _offset(self, place: Ints) -> int:
        block, *rest = place.tolist()
        one = self.rank.bytes[(self.blocks[block], *rest)[:-1]][rest[-1] : rest[-1] + 1]
        return int(offsets(one, self.rank.memory)[0])

    def may_be(self, place: Sequence[int]) -> bool:
        """Whether a wrong byte may be in one of our blocks, because it was changed before it was read, or on its way.

        Args:
            place: Its coordinates, with the place of the block among ours.
        """
        where = np.array(place)
        block, *rest = where.tolist()
        value = int(self.rank.bytes[(self.blocks[block], *rest)])
        return value in self._scribbles(where) or value in self.flipped.get(self._offset(where), ())

    def _say(self, place: Ints) -> str:
        block, _, head, kv, token, byte = place.tolist()
        number = (self.skipped + block) * BLOCK + self.rank.tokens[token]
        return f"{'kv'[kv]} of token {number}, head {head + self.rank.held[0]}, byte {byte}"
