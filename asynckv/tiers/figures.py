"""Figures of an offload: for its owner, for its engine's statistics, and for the log at intervals."""

from __future__ import annotations

from collections import Counter

from asynckv import told
from asynckv.config import OffloadConfig
from asynckv.engine.driver import Driver
from asynckv.offload.job import MoveKind
from asynckv.tiers.mover import Mover

COUNTED = {
    "host_evicted": "evicted.host",
    "file_evicted": "evicted.file",
    "lost_before_write_back": "not_written_back.evicted",
    "write_backs_without_room": "not_written_back.no_room",
    "write_backs_failed": "not_written_back.failed",
    "write_backs_lost": "not_written_back.files_lost",
}
"""Which of the catalogue's figures only grow, and what they are called here."""

FIRST_S, TOLD_S = 1.0, 60.0
"""At least so long is between two lines of what was moved: a second at first, then as long as it took up to the last
line, so that the log of a process that is killed early says something as well, and a minute at most."""

TOLD = (
    *("bytes.", "blocks.", "tokens.", "evicted.", "not_stored.", "not_written_back."),
    *("records_lost", "moves_failed", "lookup"),
)
"""Which counters these lines have."""

GAUGES = ("to_write_back", "jobs", "pins", "moves", "moves_in_doubt")
"""Which of the catalogue's figures are called the same here."""

NOW = frozenset(
    {
        *("copies.running", "copies.waiting", "copies.in_doubt", "copies.backlog_bytes", "copies.threads"),
        *("files.running", "files.records", "files.is_read_only", "files.is_off"),
    }
)
"""Gauges among the planes' figures; all others are counters."""


class Figures:
    """Counters and gauges of a rank's own shelf, and of all that is moved."""

    def __init__(self, driver: Driver, mover: Mover, config: OffloadConfig) -> None:
        self._driver, self._mover, self._config = driver, mover, config
        (self._own,) = mover.shelves
        self._began = self._told_at = driver.clock.now()
        self._told = Counter[str]()

    def counters(self) -> dict[str, int]:
        said, counters = self._own.catalogue.statistics(), dict(self._mover.counts)
        counters |= {name: said.get(of, 0) for of, name in COUNTED.items()}
        return counters | {name: count for name, count in self._planes().items() if name not in NOW}

    def gauges(self) -> dict[str, int]:
        """Return the amount in each tier, whether the tier is in use, and the running jobs."""
        own, mover = self._own, self._mover
        said, file = own.catalogue.statistics(), own.catalogue.file
        gauges = {name: said[name] for name in GAUGES}
        gauges["bytes_under_way"] = sum(said[f"{kind.value}_bytes_under_way"] for kind in MoveKind)
        limits = {"host": self._config.host_bytes}
        gauges["reads.host"] = gauges["writes.host"] = int(not mover.cause)
        if file.slots.num_bytes:
            limits["file"] = self._config.file_bytes
            gauges["reads.file"] = int(not mover.cause and not file.is_off)
            gauges["writes.file"] = int(not mover.cause and file.takes_more)
        for tier, limit in limits.items():
            gauges[f"limit_bytes.{tier}"] = limit
            for name, of in (("kept", "blocks"), ("kept_bytes", "bytes"), ("leaving", "leaving")):
                gauges[f"{name}.{tier}"] = said[f"{tier}_{of}"]
        if others := [shelf.catalogue.statistics() for shelf in mover.shelves[1:]]:
            gauges["kept.others"] = sum(each["file_blocks"] for each in others)
            gauges["kept_bytes.others"] = sum(each["file_bytes"] for each in others)
        return gauges | {name: value for name, value in self._planes().items() if name in NOW}

    def _planes(self) -> dict[str, int]:
        planes = ("copies", self._mover.copies), ("files", self._own.records)
        return {f"{name}.{k}": v for name, plane in planes if plane is not None for k, v in plane.statistics().items()}

    def tell(self, least_s: float = TOLD_S) -> None:
        now, before = self._driver.clock.now(), self._told
        if now - self._told_at < min(least_s, max(self._told_at - self._began, FIRST_S)):
            return
        self._told = Counter(self.counters())
        counters = {name: count for name, count in (self._told - before).items() if name.startswith(TOLD)}
        if not any(name.startswith("bytes.") for name in counters):
            self._told = before
            return
        seconds, self._told_at = round(now - self._told_at, 6), now
        said = self._own.catalogue.statistics()
        blocks = {tier: said[f"{tier}_blocks"] for tier in ("host", "file") if f"{tier}_blocks" in said}
        self._driver.recorder.log(told.OffloadMoved(seconds, counters, blocks))
