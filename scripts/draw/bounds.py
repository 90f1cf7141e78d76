"""The table of docs/performance.md that says which part limits a rank over RDMA, from what `asynckv plan` computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asynckv.geometry.layout import Layout
from asynckv.tools.plan import bound
from asynckv.tools.plan.explain import NIC_GBIT, explain
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import PRESETS
from scripts.draw.drawing import DOCS, between, table

LLAMA, MLA, HYBRID = "llama-3.1-70b", "deepseek-v3", "nemotron-h-8b"
PAIRS: tuple[tuple[str, int, int, int, dict[str, Any]], ...] = (
    (LLAMA, 8, 8, 32, {}),
    (LLAMA, 8, 8, 1024, {}),
    (LLAMA, 8, 8, 1024, {"order": "cross-nhd"}),
    (LLAMA, 4, 8, 1024, {}),
    (LLAMA, 4, 8, 1024, {"order": "hnd"}),
    (MLA, 8, 8, 1024, {"block_size": 64}),
    (HYBRID, 2, 4, 1024, {}),
)
"""Model, prefill and decode TP, tokens of a request, and what differs from `asynckv layout`'s defaults."""


def files() -> dict[Path, str]:
    return between(DOCS / "performance.md", "bounds", f"{_table()}\n{_costs()}")


def _costs() -> str:
    measured = {
        "a request on a decode rank": bound.PYTHON_REQUEST_S,
        "each further prefill rank": bound.PYTHON_SOURCE_S,
        "a post": bound.PYTHON_POST_S,
        "a reader on a prefill rank": bound.PYTHON_READER_S,
    }
    python = ", ".join(f"{each * 1e6:.0f} µs for {what}" for what, each in measured.items())
    return (
        f"Python, measured once: {python}. Descriptors, after merging: {bound.DESCRIPTOR_S * 1e6:g} µs each, "
        f"**supposed, not measured**. The wire: {NIC_GBIT:g} Gbit/s for each rank.\n"
    )


def _table() -> str:
    rows = []
    for model, prefill, decode, tokens, sizes in PAIRS:
        report = explain(_ranks(model, decode, sizes), _ranks(model, prefill, sizes), tokens, 0)
        name = f"{model}, TP {prefill} to {decode}, {sizes.get('order', 'nhd')}, {tokens:,} tokens"
        made: dict[tuple[str, ...], str] = {}
        for row in report["bounds"][:2]:
            times = " / ".join(f"{row[f'{part}_s'] * 1e3:.2f}" for part in bound.PARTS)
            rate = f"{row['requests_per_s']:,.0f}", f"{row['share_of_wire']:.2f}"
            figures = f"{row['bytes'] / 1e6:.1f}", f"{row['descriptors']:,}", times, row["limit"], *rate
            made[figures] = "both" if figures in made else row["blocks"]
        rows += [(name, blocks, *figures) for figures, blocks in made.items()]
    return table(
        f"| pair | blocks | MB per decode rank | descriptors | ms: {' / '.join(bound.PARTS)} | limit | requests/s | "
        f"share of {NIC_GBIT:g} Gbit/s |",
        rows,
    )


def _ranks(model: str, tp: int, sizes: dict[str, Any]) -> list[Layout]:
    return [model_layout(PRESETS[model], tp_rank=r, tp_size=tp, num_blocks=4096, **sizes) for r in range(tp)]
