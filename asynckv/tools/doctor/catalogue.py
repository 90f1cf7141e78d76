"""All findings that there can be, from `findings.toml`: how bad each is, why it matters, and what to do about it."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Level = Literal["error", "warning", "note", "good"]
LEVELS: tuple[Level, ...] = ("error", "warning", "note", "good")
TOPICS = {
    "nixl": "NIXL and UCX",
    "peer": "The other side",
    "memory": "Processes and shared memory",
    "limits": "Limits and CPU",
    "network": "Network and addresses",
    "software": "Versions",
}


class Finding(Struct, frozen=True, kw_only=True):
    """One thing that was found: what was seen, why it matters, what to do, and where the documentation says more."""

    code: str
    level: Level
    topic: str
    title: str
    found: str
    why: str
    remedy: str
    link: str


_ROWS = tomllib.loads(files(__package__).joinpath("findings.toml").read_text(encoding="utf-8"))
KINDS = {
    code: Finding(code=code, level=level, topic=topic, title=title, found="", why=why, remedy=remedy, link=link)
    for code, (topic, level, title, link, why, remedy) in _ROWS.items()
}


def finding(code: str, found: str, *, remedy: str = "", level: Level | None = None) -> Finding:
    """Make a finding of a kind; a given remedy or level replaces the catalogue's."""
    kind = KINDS[code]
    return replace(kind, found=found, remedy=remedy or kind.remedy, level=level or kind.level)
