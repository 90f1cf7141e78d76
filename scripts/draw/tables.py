"""Tables within pages that are written by hand: the causes of late blocks, and the findings of `asynckv doctor`."""

from __future__ import annotations

from pathlib import Path

from asynckv.tools.diagnose.causes import CATALOGUE, HEADING, in_words
from asynckv.tools.doctor.catalogue import KINDS, TOPICS
from scripts.draw.drawing import DOCS, between, table


def files() -> dict[Path, str]:
    """Both pages, with their tables made anew."""
    return between(DOCS / "why.md", "catalogue", causes()) | between(DOCS / "doctor.md", "findings", findings())


def causes() -> str:
    """Write the catalogue of causes: a table per heading."""
    lines = []
    for heading in HEADING:
        rows = [
            (
                f"`{cause}`: {entry.title}{' (a class)' if entry.is_class else ''}",
                " ".join(in_words(entry.remedy).split()),
            )
            for cause, entry in CATALOGUE.items()
            if entry.heading is heading
        ]
        lines += [f"### {heading[0].upper()}{heading[1:]}", "", table("| cause | what to do |", rows)]
    return "\n".join(lines)


def findings() -> str:
    """Write what `asynckv doctor` may find: a list per topic."""
    lines = []
    for topic, title in TOPICS.items():
        found = [f"- {x.level} `{code}`: {x.title}" for code, x in KINDS.items() if x.topic == topic]
        lines += [f"### {title}", "", *found, ""]
    return "\n".join(lines)
