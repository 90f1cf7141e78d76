"""Tables within pages that are written by hand: the causes of late blocks, and the findings of `asynckv doctor`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from asynckv.tools.diagnose.causes import CATALOGUE, cells
from asynckv.tools.doctor.catalogue import KINDS, TOPICS
from scripts.draw.drawing import DOCS, between


def files() -> dict[Path, str]:
    """Both pages, with their tables made anew."""
    return between(DOCS / "why.md", "catalogue", causes()) | between(DOCS / "doctor.md", "findings", findings())


def causes() -> str:
    """Write the catalogue of causes."""
    out = []
    for cause, entry in CATALOGUE.items():
        kind = " *(a class)*" if entry.is_class else ""
        out.append(f"### {entry.title[0].upper()}{entry.title[1:]}\n")
        sentences = " / ".join(f"*{x}.*" for x in (entry.sentence, *entry.of.values()))
        out.append(_filled(f"`{cause}`{kind}, under *{entry.heading}*: {sentences}") + "\n")
        rows: dict[str, list[str]] = {}
        for owner, reader in cells(cause):
            rows.setdefault(reader.value, []).append(owner.value)
        for said, known in rows.items():
            out.append(_filled(f"- prefill side: {'; or '.join(known)}"))
            out += [_filled(f"- ... decode side: {said}")] if said else []
        out.append(_filled(f"- what to do: {entry.remedy}") + "\n")
    return "\n".join(out) + "\n"


def _filled(text: str) -> str:
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 120, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def findings() -> str:
    """Write what `asynckv doctor` may find: a table per topic."""
    lines = []
    for topic, title in TOPICS.items():
        lines += [f"### {title}", "", "| finding | why it matters | what to do |", "|---|---|---|"]
        for code, kind in KINDS.items():
            if kind.topic == topic:
                cells = (f"**{kind.level}** `{code}`: {kind.title}", kind.why, kind.remedy)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)
