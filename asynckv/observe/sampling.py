"""Choice of the events that are logged: events that strangers can cause at a limited rate, and a sample of successes.

**Successful requests** are sampled consistently: prefill and decode ranks log the same ones. A request is logged if the
hash of its token, which is random and known to all ranks, ends in `n` zeros. A process that sees more requests asks for
more zeros, and logs a subset of the others' requests. The number of zeros rises as soon as more than the configured
number was logged within a second, and falls by one a second. Requests beyond the rate are left out whatever their hash.
"""

from __future__ import annotations

import math
from zlib import crc32

from asynckv.core.limits import Limiter

ROOM = 0.75  # share of the configured rate that is aimed at, because requests never come evenly


class Rate:
    """A limit on how often an event is logged; the omitted ones are counted for the next line."""

    def __init__(self, per_s: float, burst: float) -> None:
        self._limit, self._skipped = Limiter(per_s, burst), 0

    def take(self, now: float) -> bool:
        may = self._limit.take("", now)
        self._skipped += not may
        return may

    def left_out(self) -> dict[str, int]:
        skipped, self._skipped = self._skipped, 0
        return {"not_logged": skipped} if skipped else {}


class Sampler:
    """Choose by token which successes are logged: `per_s` at most, if their hash ends in `zeros` zeros."""

    zeros: int

    def __init__(self, per_s: float) -> None:
        self._ask_for(0)
        self._per_s = per_s or 1e-9  # for a rate of 0, which the limit below enforces
        self._limit = Limiter(per_s, max(per_s, 1.0) if per_s else 0.0)
        self._since = -math.inf
        self._seen = self._chosen = 0

    def take(self, token: str, now: float) -> bool:
        if now - self._since >= 1.0:
            self._next_second(now)
        self._seen += 1
        if crc32(token.encode()) & self._mask:
            return False
        self._chosen += 1
        if self._chosen > self._per_s and self.zeros < 32:
            self._ask_for(self.zeros + 1)
            self._chosen //= 2
        return self._limit.take("", now)

    def _next_second(self, now: float) -> None:
        seconds = now - self._since
        wanted = self._seen / max(seconds, 1.0) / (self._per_s * ROOM)
        needed = math.ceil(math.log2(wanted)) if wanted > 1 else 0
        fallen = self.zeros - int(min(seconds, 32))
        self._ask_for(min(max(needed, fallen, 0), 32))
        self._since, self._seen, self._chosen = now, 0, 0

    def _ask_for(self, zeros: int) -> None:
        self.zeros, self._mask = zeros, (1 << zeros) - 1
