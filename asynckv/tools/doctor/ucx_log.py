"""Facts in UCX's log: versions, lanes, the protocols that were used, and complaints (UCX 1.23)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

from asynckv.tools.doctor.facts import Ucx, Use

ENVIRONMENT = {"UCX_PROTO_INFO": "used", "UCX_LOG_LEVEL": "info", "UCX_WARN_UNUSED_ENV_VARS": "y"}
MOST_LINES = 40_000
MOST_KEPT = 20
MOST_TEXT = 500

_LINE = re.compile(r"\S+:\d+\s+UCX\s+(INFO|WARN|ERROR|FATAL|DIAG)\s+(.*)")
_ABORT = re.compile(r"\[\S+:\d+:\d+:\d+\]\s+(\S+\.(?:c|inl|h|cc|cpp):\d+\s+.*)")
_VERSION = re.compile(r"Version (\S+) \(loaded from ([^,]+)")
_LANES = re.compile(r"(\S+) (self|intra-node|inter-node) cfg#\d+ (.*)")
_LANE = re.compile(r"[\w\\]+/[\w:.\\-]+")
_UNKNOWN = re.compile(r"unused environment variables?: (.*)")
_MAYBE = re.compile(r"(\w+)(?: \(maybe: (\w+)\?\))?")
_HEAD = re.compile(r"\]\s+\| [^|]+\|\s*$")
_TITLE = re.compile(r"\| remote memory read ")
_ROW = re.compile(r"\|\s*(\d+) \| ([^|]+?) +\| ([^|]+?) +\| ([^|]+?) +\|\s*$")


def read_log(lines: Iterable[str]) -> Ucx:
    """Read what processes logged. `lanes` are those to other processes; to itself an agent always has some."""
    version, library = "", ""
    lanes, unknown, unavailable, errors = (dict[Any, None]() for _ in range(4))
    uses: Counter[tuple[str, str, str]] = Counter()
    is_read = False
    for line in islice(lines, MOST_LINES):
        if row := _ROW.search(line):
            if is_read:
                uses[row[2], row[3], row[4]] += int(row[1])
        elif _HEAD.search(line):
            is_read = bool(_TITLE.search(line))
        elif found := _LINE.search(line):
            level, text = found[1], _short(found[2])
            if found := _VERSION.match(text):
                version, library = found[1], found[2]
            elif found := _LANES.match(text):
                lanes |= dict.fromkeys(_LANE.findall(found[3]) if found[2] != "self" else ())
            elif found := _UNKNOWN.search(text):
                unknown |= {(m[1], m[2] or ""): None for m in map(_MAYBE.match, found[1].split("; ")) if m}
            elif "is not available, please use one or more of" in text:
                unavailable[text] = None
            elif level in ("WARN", "ERROR", "FATAL") and "UCX_WARN_UNUSED_ENV_VARS" not in text:
                errors[text] = None
        elif found := _ABORT.search(line):
            errors[_short(found[1])] = None
    return Ucx(
        version=version,
        library=library,
        lanes=tuple(lanes),
        uses=tuple(Use(count=count, sizes=k[0], how=k[1], transport=k[2]) for k, count in uses.most_common()),
        unknown=tuple(unknown)[:MOST_KEPT],
        unavailable=tuple(unavailable)[:MOST_KEPT],
        errors=tuple(errors)[:MOST_KEPT],
    )


def _short(text: str) -> str:
    return " ".join(text.split())[:MOST_TEXT]
