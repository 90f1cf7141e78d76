"""What UCX's log tells: versions, lanes, what was really used, and all that it complains of.

Read with `UCX_LOG_LEVEL=info` and `UCX_PROTO_INFO=used` (UCX 1.23). What is not recognised is left out, or, where it
is a warning or an error, kept as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from msgspec import Struct

from asynckv.tools.doctor.facts import Use

__all__ = ["ENVIRONMENT", "Said", "read_log"]

ENVIRONMENT = {"UCX_PROTO_INFO": "used", "UCX_LOG_LEVEL": "info", "UCX_WARN_UNUSED_ENV_VARS": "y"}
MOST_LINES = 20_000
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


class Said(Struct, kw_only=True):
    """What was found in the logs of one process."""

    version: str = ""
    library: str = ""
    lanes: tuple[str, ...] = ()
    uses: tuple[Use, ...] = ()
    unknown: tuple[tuple[str, str], ...] = ()
    unavailable: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


def read_log(lines: Iterable[str]) -> Said:
    """Read one process's log. `lanes` are those to other processes; to itself an agent always has some."""
    said = Said()
    uses: dict[tuple[str, str, str], int] = {}
    is_read = False
    for _, line in zip(range(MOST_LINES), lines, strict=False):
        if row := _ROW.search(line):
            if is_read:
                key = row[2], row[3], row[4]
                uses[key] = uses.get(key, 0) + int(row[1])
        elif _HEAD.search(line):
            is_read = bool(_TITLE.search(line))
        elif found := _LINE.search(line):
            _take(said, found[1], " ".join(found[2].split())[:MOST_TEXT])
        elif found := _ABORT.search(line):
            _complain(said, " ".join(found[1].split())[:MOST_TEXT])
    ordered = sorted(uses, key=lambda key: -uses[key])
    said.uses = tuple(Use(count=uses[k], sizes=k[0], how=k[1], transport=k[2]) for k in ordered)
    return said


def _take(said: Said, level: str, text: str) -> None:
    if found := _VERSION.match(text):
        said.version, said.library = found[1], found[2]
    elif found := _LANES.match(text):
        if found[2] != "self":
            said.lanes = tuple(dict.fromkeys([*said.lanes, *_LANE.findall(found[3])]))
    elif found := _UNKNOWN.search(text):
        names = [(m[1], m[2] or "") for m in map(_MAYBE.match, found[1].split("; ")) if m]
        said.unknown = tuple(dict.fromkeys([*said.unknown, *names]))[:MOST_KEPT]
    elif "is not available, please use one or more of" in text:
        said.unavailable = tuple(dict.fromkeys([*said.unavailable, text]))[:MOST_KEPT]
    elif level in ("WARN", "ERROR", "FATAL") and "UCX_WARN_UNUSED_ENV_VARS" not in text:
        _complain(said, text)


def _complain(said: Said, text: str) -> None:
    if len(said.errors) < MOST_KEPT and text not in said.errors:
        said.errors += (text,)
