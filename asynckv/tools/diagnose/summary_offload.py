"""What ranks have kept outside of the accelerator, and what was moved when: from their own words alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from asynckv.core import told
from asynckv.tools.diagnose.records import Record, integer
from asynckv.tools.diagnose.summary_model import Offload, Offloads
from asynckv.tools.diagnose.summary_time import Windows

__all__ = ["MOVES", "offloads"]

MOVES = ("load", "store", "promotion", "write_back")
MAX_COUNTERS = 100
MAX_TEXT = 200


def offloads(by_process: Mapping[str, Sequence[Record]], windows: Windows) -> Offloads:
    """Sum up all ranks."""
    per_s = {move: windows.zeros() for move in MOVES}
    ranks = [of for rank, records in by_process.items() if (of := _rank(rank, records, windows, per_s)) is not None]
    return Offloads(ranks=ranks, bytes_per_s=per_s if any(any(each) for each in per_s.values()) else {})


def _rank(rank: str, records: Sequence[Record], windows: Windows, per_s: Mapping[str, list[float]]) -> Offload | None:
    found, counted, is_known = Offload(rank=rank), Counter[str](), False
    for record in records:
        match record.event:
            case told.OffloadStarted.event:
                found.host_bytes = max(record.integer("host_bytes"), 0)
                found.file_bytes = max(record.integer("file_bytes"), 0)
            case told.OffloadMoved.event:
                counters = _counters(record)
                counted.update(counters)
                seconds = max(record.number("seconds", 0.0), 0.0)
                for move, into in per_s.items():
                    amount = counters.get(f"bytes.{move}", 0) / windows.seconds
                    windows.spread(into, record.at - seconds, record.at, amount)
                blocks = record.mapping("blocks")
                found.blocks = {tier: max(integer(blocks.get(tier), 0), 0) for tier in ("host", "file")}
                found.told_at = record.at
            case told.OffloadStopped.event:
                found.counters, found.told_at, found.has_stopped = _counters(record), record.at, True
            case told.OffloadFailed.event:
                found.failed += 1 + max(record.integer("not_logged", 0), 0)
            case told.OffloadFilesLost.event:
                found.files_lost = record.text("cause")[:MAX_TEXT]
            case _:
                continue
        is_known = True
    found.counters = found.counters or dict(counted)
    return found if is_known else None


def _counters(record: Record) -> dict[str, int]:
    said = list(record.mapping("counters").items())[:MAX_COUNTERS]
    return {name[:MAX_TEXT]: count for name, value in said if (count := integer(value)) > 0}
