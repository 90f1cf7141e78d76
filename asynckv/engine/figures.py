"""What is told of an offload in figures: to its owner, with its engine's own, and in the log now and then."""

from __future__ import annotations

from collections import Counter

from asynckv.config import OffloadConfig
from asynckv.engine.driver import Driver
from asynckv.engine.mover import Mover
from asynckv.observe.events import EVENT
from asynckv.offload.job import MoveKind
from asynckv.results import Statistics

__all__ = ["Figures"]

COUNTED = {
    "host_evicted": "evicted.host",
    "file_evicted": "evicted.file",
    "lost_before_write_back": "not_written_back.evicted",
    "write_backs_without_room": "not_written_back.no_room",
    "write_backs_failed": "not_written_back.failed",
    "write_backs_lost": "not_written_back.files_lost",
}
"""Which of the catalogue's figures only grow, and what they are called here."""

TOLD_S = 60.0
"""At least so long is between two lines of what was moved."""

TOLD = (
    *("bytes.", "blocks.", "tokens.", "evicted.", "not_stored.", "not_written_back."),
    *("records_lost", "moves_failed", "lookup"),
)
"""Which counters these lines have."""

GAUGES = ("host_blocks", "file_blocks", "to_write_back", "jobs", "pins", "moves", "moves_in_doubt")


class Figures:
    """Counters and gauges of a rank's own shelf, and of all that is moved."""

    def __init__(self, driver: Driver, mover: Mover, config: OffloadConfig) -> None:
        self._driver, self._mover, self._config = driver, mover, config
        (self._own,) = mover.shelves
        self._told_at, self._told = driver.clock.now(), Counter[str]()

    def counters(self) -> dict[str, int]:
        """What happened since the start, and what the planes say."""
        said, counters = self._own.catalogue.statistics(), dict(self._mover.counts)
        counters |= {name: said.get(of, 0) for of, name in COUNTED.items()}
        for plane, name in ((self._mover.copies, "copies"), (self._own.records, "files")):
            if plane is not None:
                counters |= {f"{name}.{key}": count for key, count in plane.statistics().items()}
        return counters

    def statistics(self) -> Statistics:
        """Take a snapshot."""
        said = self._own.catalogue.statistics()
        gauges = {name: said.get(name, 0) for name in GAUGES}
        gauges["bytes_under_way"] = sum(said[f"{kind.value}_bytes_under_way"] for kind in MoveKind)
        return Statistics(self.counters(), gauges, (), 0.0, 0.0, {})

    def told_by_the_engine(self) -> dict[str, int]:
        """What is told with the engine's own counters: how much is kept as well."""
        said = self._own.catalogue.statistics()
        now = {"limit_bytes.host": self._config.host_bytes, "limit_bytes.file": self._config.file_bytes}
        for name, of in (("kept", "blocks"), ("kept_bytes", "bytes"), ("leaving", "leaving")):
            now |= {f"{name}.{tier}": said.get(f"{tier}_{of}", 0) for tier in ("host", "file")}
        return {f"offload.{name}": count for name, count in (self.counters() | now).items()}

    def tell(self, least_s: float = TOLD_S) -> None:
        """Log what was moved, now and then."""
        now, before = self._driver.clock.now(), self._told
        if now - self._told_at < least_s:
            return
        self._told = Counter(self.counters())
        counters = {name: count for name, count in (self._told - before).items() if name.startswith(TOLD)}
        if not any(name.startswith("bytes.") for name in counters):
            self._told = before
            return
        seconds, self._told_at = round(now - self._told_at, 6), now
        said = self._own.catalogue.statistics()
        blocks = {tier: said[f"{tier}_blocks"] for tier in ("host", "file") if f"{tier}_blocks" in said}
        self._driver.recorder.event("info", EVENT.OFFLOAD_MOVED, seconds=seconds, counters=counters, blocks=blocks)
