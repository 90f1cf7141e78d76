"""Spent keys: lent or withdrawn once, and never to be lent again.

If a key were lent twice, a grant of the first time would vouch for the blocks of the second. The sequence numbers of
each scheduler (an epoch of keys) are kept as runs of spent numbers, as a QUIC receiver keeps packet numbers (RFC 9000,
section 13.2.3). Memory grows with the gaps between runs. Beyond `MAX_GAPS` the oldest gaps of the scheduler that has
most are closed, as if their numbers were spent. A request that was open for too long then needs new params, but no key
is lent twice.
"""

from __future__ import annotations

from bisect import bisect_right

from asynckv.core.types import Key

MAX_GAPS = 65_536
"""Gaps that are kept, over all schedulers; about 5 MB. A gap is one or more requests that later ones have passed."""

MAX_EPOCHS = 4096
"""Schedulers (`PrefillRanks`) that are told apart. Beyond that, the least recently used is forgotten with its keys."""


class SpentKeys:
    def __init__(self, max_gaps: int = MAX_GAPS, max_epochs: int = MAX_EPOCHS) -> None:
        self.max_gaps, self._max_epochs = max_gaps, max_epochs
        self._runs: dict[str, tuple[list[int], list[int]]] = {}
        """Epoch -> first and last number of each run, ascending. The epoch that was used last comes last, and the first
        run begins before all numbers."""
        self._latest = ""
        self.num_gaps = 0
        self.num_given_up = 0  # number of open keys that are treated as spent, for lack of room
        self.num_forgotten = 0

    def __contains__(self, key: Key) -> bool:
        """Return True if the number was used, whatever the token, because no two keys of a scheduler share a number."""
        runs = self._runs.get(key.epoch)
        if runs is None:
            return False
        firsts, lasts = runs
        return key.sequence <= lasts[bisect_right(firsts, key.sequence) - 1]

    def add(self, key: Key) -> bool:
        """Spend a key. Return False if it was spent before."""
        sequence = key.sequence
        firsts, lasts = self._runs[key.epoch] if key.epoch == self._latest else self._turn_to(key.epoch)
        if sequence == lasts[-1] + 1:  # the usual case: keys are lent in order
            lasts[-1] = sequence
            return True
        after = bisect_right(firsts, sequence)
        before = after - 1
        if sequence <= lasts[before]:
            return False
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
            if self.num_gaps > self.max_gaps:
                self._close_oldest()
        return True

    def _turn_to(self, epoch: str) -> tuple[list[int], list[int]]:
        runs = self._runs.pop(epoch, None) or ([-1], [-1])
        if len(self._runs) >= self._max_epochs:
            firsts, _ = self._runs.pop(next(iter(self._runs)))
            self.num_gaps -= len(firsts) - 1
            self.num_forgotten += 1
        self._runs[epoch] = runs
        self._latest = epoch
        return runs

    def _close_oldest(self) -> None:
        """Close the lowest gaps of the scheduler that has most, so that it pays for its own gaps."""
        firsts, lasts = max(self._runs.values(), key=lambda runs: len(runs[0]))
        # Close several at once, because each time all later runs move up.
        count = min(max(self.max_gaps // 64, 1), len(firsts) - 1)
        self.num_given_up += sum(firsts[i + 1] - lasts[i] - 1 for i in range(count))
        lasts[0] = lasts[count]
        del firsts[1 : count + 1], lasts[1 : count + 1]
        self.num_gaps -= count
