"""Draw the pictures of geometry from real plans; a test compares them."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
from rich.console import RenderableType

from asynckv.geometry.blocks import check_block_ids, runs_of
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.layout import ONE_PER_REQUEST, Group, Layout, Memory, Part, View, dense_part
from asynckv.geometry.match import assign, remote_ranks
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import plan_read
from asynckv.geometry.tables import PeerTables
from asynckv.tools.plan.layouts import model_layout
from asynckv.tools.plan.models import Heads, Latent, Model, Projection, State
from scripts.draw.bars import Bar, Segment, bars
from scripts.draw.drawing import PICTURES, to_svg


def ranks(model: Model, tp_size: int) -> list[Layout]:
    """Return the layouts of all ranks of one engine."""
    return [model_layout(model, tp_rank=r, tp_size=tp_size) for r in range(tp_size)]


def shares(title: str, model: Model, prefill: int, decode: int, part: str, extent: int) -> RenderableType:
    """Draw the shares of an axis that ranks hold, and the ranks that read them."""
    there, here = ranks(model, prefill), ranks(model, decode)
    read: dict[int, list[Segment]] = {p: [] for p in range(prefill)}
    rows = []
    for d, layout in enumerate(here):
        answered = list(remote_ranks(d, decode, prefill))
        segments = []
        for p, row in zip(answered, assign(layout, [there[p] for p in answered]), strict=True):
            for share in row:
                if share.local_part.name == part:
                    lo, hi = (share.lo, share.hi) if share.local_part.axis else (0, extent)
                    segments.append(Segment(lo, hi, f"p{p}", d))
                    read[p].append(Segment(lo, hi, f"d{d}", d))
        others = ", ".join(str(p) for p in answered)
        rows.append(Bar(f"decode tp{d}", segments, f"releases {others}"))
    held = {p: next(x for v in layout.views for x in v.parts if x.name == part) for p, layout in enumerate(there)}
    first = []
    for p, segments in read.items():
        lo, hi = held[p].held if held[p].axis else (0, extent)
        seen: list[Segment] = []
        for segment in segments:
            same = [i for i, s in enumerate(seen) if (s.lo, s.hi) == (segment.lo, segment.hi)]
            if same:
                seen[same[0]] = seen[same[0]]._replace(label=seen[same[0]].label + f", d{segment.colour}")
            else:
                seen.append(segment)
        rest = [] if segments else [Segment(lo, hi, "a replica, not read")]
        first.append(Bar(f"prefill tp{p}", [*seen, *rest], "" if segments else "released all the same"))
    return bars(title, extent, [*first, *rows], width=48)


def one_group(block_size: int, ratio: int = 1, kind: str = "tokens") -> Layout:
    """Return a small layout with a single part."""
    group = Group("g", block_size, 64, ratio, kind)  # type: ignore[arg-type]
    dims = [("token", group.kernel_size), ("dim", 1)] if kind == "tokens" else [("dim", 1)]
    part: Part = dense_part("kv", "int8", dims)
    size = group.kernel_size if kind == "tokens" else 1
    return Layout(
        memories=(Memory(0, 64 * ratio * size),), groups=(group,), views=(View(0, 0, "layer", 0, size, (part,)),)
    )


def tokens(title: str, here: int, there: int, first: int, num_tokens: int) -> RenderableType:
    """Draw how two block sizes and a cached prefix are cut along the tokens."""
    local, remote = one_group(here), one_group(there)
    peer = PeerTables(local, remote, assign(local, [remote])[0], itertools.count(1))
    mine, theirs = -(-num_tokens // here), -(-num_tokens // there)
    lists = BlockLists(
        check_block_ids(local, [(first, list(range(first // here, mine)))]),
        [BlockRuns(0, runs_of(list(range(theirs))))],
        num_tokens,
    )
    pieces = []
    for section in plan_read(peer, lists).sections:
        span = section.table.span
        for block, source in zip(section.local.tolist(), section.remote.tolist(), strict=True):
            start = block * here + span.local_offset
            pieces.append(Segment(start, start + span.tokens, f"{source}>{block}", source))
    pieces.sort()
    extent = max(mine * here, theirs * there)
    padding = [
        Segment(p.block_id * here + p.first_token, p.block_id * here + p.first_token + p.num_tokens, "rest")
        for p in lists.padding(local)
    ]
    rows = [
        Bar("tokens", [Segment(0, first, "cached", None), Segment(first, num_tokens, "wanted", 1)]),
        Bar(f"prefill, {there}", [Segment(i * there, (i + 1) * there, f"block {i}", i) for i in range(theirs)]),
        Bar(f"decode, {here}", [Segment(i * here, (i + 1) * here, f"block {i}") for i in range(first // here, mine)]),
        Bar("pieces", pieces),
        Bar("not filled", padding),
    ]
    return bars(title, extent, rows, width=64)


def conv(title: str) -> RenderableType:
    """Draw the channels of a convolution's state on one prefill rank and two decode ranks."""
    state = State((Projection("x", 4, 4), Projection("B", 2, 4), Projection("C", 2, 4)), 3, 4, (4, 4))
    model = Model("m", (state,))
    there, here = ranks(model, 1), ranks(model, 2)
    names = {"conv_x": 0, "conv_B": 2, "conv_C": 3}

    def channels(part: Part, lo: int, hi: int) -> tuple[float, float]:
        width = part.itemsize * 3
        start = part.offset // width + (lo - part.held[0]) * 4
        return start, start + (hi - lo) * 4

    def held(layout: Layout) -> list[Segment]:
        parts = (p for p in layout.views[0].parts if p.name in names)
        return [Segment(*channels(p, *p.held), p.name[5:], names[p.name]) for p in parts]

    rows = [Bar("prefill tp0", held(there[0]), "32 channels")]
    for d, layout in enumerate(here):
        segments = [
            Segment(
                *channels(s.remote_part, s.lo, s.hi), f"{s.local_part.name[5:]} {s.lo}:{s.hi}", names[s.local_part.name]
            )
            for s in assign(layout, there)[0]
            if s.local_part.name in names
        ]
        rows.append(Bar(f"read by tp{d}", segments, "three reads"))
        rows.append(Bar(f"decode tp{d}", held(layout), "16 channels"))
    return bars(title, 32, rows, width=48)


def states(title: str, num_tokens: int) -> RenderableType:
    """Draw which state is moved: the one after the last token, wherever each side keeps it."""
    local, remote = one_group(ONE_PER_REQUEST, kind="state"), one_group(16, kind="state")
    peer = PeerTables(local, remote, assign(local, [remote])[0], itertools.count(1))
    theirs: list[int | None] = [None, 41, None, 43, 44]
    lists = BlockLists(check_block_ids(local, [(0, [7])]), [BlockRuns(0, runs_of(theirs))], num_tokens)
    [section] = plan_read(peer, lists).sections
    source = int(np.asarray(section.remote)[0])
    rows = [
        Bar("tokens", [Segment(0, num_tokens, f"{num_tokens} tokens", 1)]),
        Bar(
            "prefill, one per 16",
            [
                Segment(i * 16, i * 16 + 16, "null" if b is None else f"slot {b}", 2 if b == source else None)
                for i, b in enumerate(theirs)
            ],
        ),
        Bar("decode, one slot", [Segment(0, 80, f"slot 7, read from slot {source}", 2)]),
    ]
    return bars(title, 80, rows, width=60)


def files() -> dict[Path, str]:
    """Return the pictures by their paths."""
    gqa, few, mla = (Model("m", (layer,)) for layer in (Heads(12, 8), Heads(2, 8), Latent(8, 4)))
    drawn: dict[str, tuple[RenderableType, ...]] = {
        "heads": (shares("12 KV heads, from prefill ranks p0 to p3 to decode ranks d0 to d5", gqa, 4, 6, "k", 12),),
        "replicas": (
            shares("2 KV heads on 4 prefill ranks (two replicas of each), to one decode rank d0", few, 4, 1, "k", 2),
            shares("A latent (MLA), the same on all ranks: from 4 ranks to 2", mla, 4, 2, "latent", 2),
        ),
        "tokens": (
            tokens("Blocks of 32 tokens there, of 48 here; 37 tokens cached, 130 wanted", 48, 32, 37, 130),
            tokens("Equal sizes: whole blocks; the last one is read over its end", 16, 16, 32, 118),
        ),
        "conv": (conv("Channels of a Mamba-2 convolution's state: x, B and C are cut each by itself"),),
        "states": (states("Slots of states are paired by the token they are of", 61),),
    }
    return {PICTURES / f"{name}.svg": to_svg(*shown, name=name) for name, shown in drawn.items()}
