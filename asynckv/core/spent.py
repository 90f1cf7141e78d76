"""Which keys are spent: lent or withdrawn once, and never to be lent again.

Requests are lent in any order, or never. What a claim names may therefore still come, unless its key is spent. The
sequence numbers of one scheduler are kept as runs of spent ones, as a QUIC receiver keeps the packet numbers that it
has seen (RFC 9000, section 13.2.3); requests that are still open, and those that will never be lent, are the gaps
between the runs. So memory grows with the gaps, however many requests lie in one, and those are bounded: beyond
`MAX_GAPS` the oldest is closed, as if what lies in it were spent. That is the safe side: a request that is open for so
long has to be described anew, but no key is ever lent twice.
"""

from __future__ import annotations

from bisect import bisect_right

from asynckv.core.types import Key

__all__ = ["MAX_GAPS", "SpentKeys"]

MAX_GAPS = 65_536
"""Gaps that are kept, over all schedulers: some 5 MB at most. 100,000 open requests make at most half as many, whatever
the order in which they are lent."""

MAX_EPOCHS = 1024
"""Starts of schedulers that are told apart; the oldest is forgotten. Only the engine's own calls bring new ones."""


class SpentKeys:
    """Sequence numbers that were used, per epoch; see the module."""

    def __init__(self, max_gaps: int = MAX_GAPS) -> None:
        self._max_gaps = max_gaps
        self._runs: dict[str, tuple[list[int], list[int]]] = {}
        """Epoch -> first and last number of each run, ascending. The first run begins before all numbers."""
        self.num_gaps = 0

    def __contains__(self, key: Key) -> bool:
        """The number was used, whatever the token: no two keys share one."""
        runs = self._runs.get(key.epoch)
        if runs is None:
            return False
        firsts, lasts = runs
        return key.sequence <= lasts[bisect_right(firsts, key.sequence) - 1]

    def add(self, key: Key) -> int:
        """Spend a key; return how many open ones had to be given up for lack of room."""
        sequence = key.sequence
        runs = self._runs.get(key.epoch)
        if runs is None:
            runs = self._open(key.epoch)
        firsts, lasts = runs
        if sequence == lasts[-1] + 1:  # in order, as most are
            lasts[-1] = sequence
            return 0
        after = bisect_right(firsts, sequence)
        before = after - 1
        if sequence <= lasts[before]:
            return 0
        touches_before = sequence == lasts[before] + 1
        touches_after = after < len(firsts) and sequence == firsts[after] - 1
        if touches_before and touches_after:
            lasts[before] = lasts[after]
            del firsts[after], lasts[after]
            self.num_gaps -= 1
        elif touches_before:
            lasts[before] = sequence
        elif touches_after:
            firsts[after] = sequence
        else:
            firsts.insert(after, sequence)
            lasts.insert(after, sequence)
            self.num_gaps += 1
            if self.num_gaps > self._max_gaps:
                return self._close_oldest()
        return 0

    @property
    def epochs(self) -> tuple[str, ...]:
        """Starts of schedulers that are known, the oldest first."""
        return tuple(self._runs)

    def _open(self, epoch: str) -> tuple[list[int], list[int]]:
        if len(self._runs) >= MAX_EPOCHS:
            firsts, _ = self._runs.pop(next(iter(self._runs)))
            self.num_gaps -= len(firsts) - 1
        runs = self._runs[epoch] = ([-1], [-1])
        return runs

    def _close_oldest(self) -> int:
        """Close the lowest gap of the oldest scheduler that has one."""
        firsts, lasts = next(runs for runs in self._runs.values() if len(runs[0]) > 1)
        given_up = firsts[1] - lasts[0] - 1
        lasts[0] = lasts[1]
        del firsts[1], lasts[1]
        self.num_gaps -= 1
        return given_up
