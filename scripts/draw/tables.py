"""Tables within pages that are written by hand: the causes of late blocks, and the findings of `asynckv doctor`."""

from __future__ import annotations

from pathlib import Path

from asynckv.tools.diagnose.causes import CATALOGUE, HEADING
from asynckv.tools.doctor.catalogue import KINDS, TOPICS
from scripts.draw.drawing import DOCS, between


def files() -> dict[Path, str]:
    """Both pages, with their tables made anew."""
    return between(DOCS / "why.md", "catalogue", causes()) | between(DOCS / "doctor.md", "findings", findings())


def causes() -> str:
    """Write the catalogue of causes: a table per heading, in which words in braces are a request's own."""
    lines = []
    for heading in HEADING:
        lines += [f"### {heading[0].upper()}{heading[1:]}", "", "| cause | evidence | what to do |", "|---|---|---|"]
        for cause, entry in CATALOGUE.items():
            if entry.heading is heading:
                told = " / ".join((entry.sentence, *entry.of.values()))
                lines.append(
                    _row(f"`{cause}`: {entry.title}{' (a class)' if entry.is_class else ''}", told, entry.remedy)
                )
        lines.append("")
    return "\n".join(lines)


def _row(*cells: str) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def findings() -> str:
    """Write what `asynckv doctor` may find: a table per topic."""
    lines = []
    for topic, title in TOPICS.items():
        lines += [f"### {title}", "", "| finding | what to do |", "|---|---|"]
        for code, kind in KINDS.items():
            if kind.topic == topic:
                lines.append(_row(f"**{kind.level}** `{code}`: {kind.title}", kind.remedy))
        lines.append("")
    return "\n".join(lines)
