"""Explains a transfer between two engines from their layouts, by the planner of a running engine."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console

from asynckv.config import PullConfig
from asynckv.errors import ConfigError, LayoutError, PlanRefused, RemoteTooShort
from asynckv.geometry.blocks import check_block_ids, runs_of
from asynckv.geometry.bounds import BlockRuns
from asynckv.geometry.gather import packs
from asynckv.geometry.layout import Layout, TokenShard
from asynckv.geometry.match import (
    Difference,
    NotCovered,
    Share,
    assign,
    compare,
    layer_names,
    owed_readers,
    predicted,
    remote_ranks,
    strange_layers,
)
from asynckv.geometry.overlap import pools
from asynckv.geometry.pairing import BlockLists
from asynckv.geometry.plan import Plan, Section, plan_read
from asynckv.geometry.staging import TYPICAL
from asynckv.geometry.tables import PeerTables
from asynckv.tools.console import grouped, printable, size
from asynckv.tools.output import print_table
from asynckv.tools.plan import bound

SCHEMA = "asynckv.plan/1"
NIC_GBIT = 400.0
CHUNK_TOKENS = 8192
WAYS = {
    "staged": "Staged reads[/bold]: long runs; their pieces are copied to their places",
    "packed": "Packed copies[/bold]: the prefill rank gathers what is needed, and long runs of that are read",
}
BLOCKS = {"scattered": ("descriptors", "posts_scattered"), "runs": ("descriptors_in_runs", "posts")}
LEGEND = (
    "bytes: a last, partly filled block is read to its end, unless ranks share it.",
    "pieces per block: byte ranges that are contiguous on both sides, or runs of staged reads, in all layers of the "
    "group; a state counts as one block.",
    "descriptors: those of the whole request. if in runs: the number that is left if blocks lie in runs on both "
    "sides, so that neighbours merge.",
    "posts: transfers handed to NIXL, by the default limits of bytes and descriptors.",
)
COUNTS = ("pieces_per_block", "descriptors", "descriptors_in_runs", "posts")
BOUND_LEGEND = (
    "the slowest part of a request is the limit, as if requests overlapped without loss. Python was measured on one "
    f"machine; {bound.DESCRIPTOR_S * 1e6:g} µs per descriptor are supposed. share: of the device's bandwidth."
)


def explain(
    local: Sequence[Layout],
    remote: Sequence[Layout],
    num_tokens: int,
    cached: int,
    progress: Callable[[], None] = lambda: None,
    nic_gbit: float = NIC_GBIT,
    prefill_rate: float | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
) -> dict[str, Any]:
    """Plan one request on every local rank.

    `nic_gbit` is the bandwidth of each rank's device, in Gbit/s. `prefill_rate`, in tokens per second, asks what a head
    start by chunks of `chunk_tokens` is worth.
    """
    by_place = {(x.pp_stage, x.tp_rank): x for x in remote}
    size, stages = remote[0].tp_size, remote[0].pp_size
    shards, ranks = remote[0].num_token_shards, []
    for layout in local:
        found = remote_ranks(layout.tp_rank, layout.tp_size, size, shards)
        answered = [(s, r) for s in range(stages) for r in found]
        if absent := [place for place in answered if place not in by_place]:
            raise ConfigError(
                f"the remote file holds {len(remote)} of its engine's {size * stages} ranks, but decode "
                f"{_place(layout)} answers for (pp_stage, tp_rank) {absent[:8]} as well; write all ranks"
            )
        ranks.append(_rank(layout, [by_place[place] for place in answered], num_tokens, cached))
        progress()
    here = local[0]
    # Sizes alone decide which decode ranks owe a release, so ranks that are not in the file are listed as well.
    owed = {
        _place(x): [
            _named(here, stage, rank)
            for stage in range(here.pp_size)
            for rank in owed_readers(x.tp_rank, x.tp_size, here.tp_size, shards)
        ]
        for x in remote
    }
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "plannable": all(not r["refused"] for r in ranks),
        "tokens": num_tokens,
        "cached": cached,
        "local": _side(local),
        "remote": _side(remote),
        "ranks": ranks,
        "owed": owed,
        "nic_gbit_per_s": nic_gbit,
        "bounds": list(_bounds(ranks, owed, nic_gbit * 1e9 / 8)),
        "problems": [*_unheld("decode", local), *_unheld("prefill", remote), *_unlike(local, remote)],
        "whole_group": _is_whole(local),
        "head_starts": [],
    }
    if prefill_rate is not None and report["bounds"]:
        report["head_starts"] = list(_head_starts(report, chunk_tokens, prefill_rate))
    return report


def _head_starts(report: dict[str, Any], chunk_tokens: int, tokens_per_s: float) -> Iterator[dict[str, Any]]:
    """Yield what a head start is worth, for each way that blocks lie; pieces bring no window and no state."""
    sides, request = report["local"]["groups"], (report["tokens"], report["cached"])
    sums: Counter[bool] = Counter()
    for g in [g for rank in report["ranks"] for read in rank["reads"] for g in read["groups"]]:
        sums[sides[g["group"]]["kind"] == "tokens" and not sides[g["group"]]["window"]] += g["bytes_read"]
    for blocks in BLOCKS:
        read_s = max(1 / row["requests_per_s"] for row in report["bounds"] if row["blocks"] in (blocks, ""))
        found = bound.head_start(*request, chunk_tokens, tokens_per_s, read_s, sums[True] / sums.total())
        yield {"blocks": blocks, **found}


def _bounds(
    ranks: Sequence[dict[str, Any]], owed: dict[str, list[str]], bytes_per_s: float
) -> Iterator[dict[str, Any]]:
    """Yield the bound of every rank that reads, with scattered blocks and with runs, and of every rank that is read."""
    sent, packed = dict.fromkeys(owed, 0), dict.fromkeys(owed, 0)
    for rank in ranks:
        for read in rank["reads"]:
            sent[read["remote"]] += read["bytes_read"]
            packed[read["remote"]] += sum(g["bytes"] for g in read["groups"] if g["way"] == "packed")
        for blocks, names in BLOCKS.items() if rank["reads"] else ():
            descriptors, posts = (sum(read[name] for read in rank["reads"]) for name in names)
            staged = sum(g["bytes"] for read in rank["reads"] for g in read["groups"] if g["way"] == "staged")
            shape = rank["bytes_read"], descriptors, posts, len(rank["releases"])
            made = bound.reader(*shape, bytes_per_s, staged * TYPICAL.place_s)
            yield {"side": "decode", "rank": rank["rank"], "blocks": blocks, **made._asdict()}
    for name, num_bytes in sent.items():
        if num_bytes:
            made = bound.lender(num_bytes, len(owed[name]), bytes_per_s, packed[name] * TYPICAL.place_s)
            yield {"side": "prefill", "rank": name, "blocks": "", **made._asdict()}


def _is_whole(layouts: Sequence[Layout]) -> bool:
    return len(layouts) == layouts[0].tp_size * layouts[0].pp_size


def _unheld(side: str, layouts: Sequence[Layout]) -> Iterator[str]:
    """Name the ranges of a part that no rank holds; this needs the layouts of a whole engine."""
    if not _is_whole(layouts):
        return
    parts = [(x.shard(view.group), view.layer, part) for x in layouts for view in x.views for part in view.parts]
    held = grouped(
        ((part.name, part.axis, layer, part.extent, shard), part.held) for shard, layer, part in parts if part.axis
    )
    gaps: list[tuple[tuple[str, str, int, int, TokenShard], str]] = []
    for (name, axis, layer, extent, shard), ranges in held.items():
        at = 0
        for lo, hi in [*sorted(ranges), (extent, extent)]:
            gaps += [((name, axis, at, lo, shard), layer)] if lo > at else []
            at = max(at, hi)
    for (name, axis, lo, hi, shard), layers in grouped(gaps).items():
        more = f" and {len(layers) - 1} more layers" if len(layers) > 1 else ""
        tokens = f" with {shard}" if shard.size > 1 else ""
        yield f"no {side} rank{tokens} holds {axis} [{lo}, {hi}) of part {name!r} in {layers[0]!r}{more}"


def _unlike(local: Sequence[Layout], remote: Sequence[Layout]) -> Iterator[str]:
    """Name the layers that only one of two whole engines has."""
    if not (_is_whole(local) and _is_whole(remote)):
        return
    known = [{name for x in side for names in layer_names(x).values() for name in names} for side in (local, remote)]
    for side, layouts, others in (("decode", local, known[1]), ("prefill", remote, known[0])):
        if names := {layer for x in layouts for layer in strange_layers(x, others)}:
            yield f"only {side} has the layers {', '.join(sorted(names)[:8])}{' ...' if len(names) > 8 else ''}"


def _side(layouts: Sequence[Layout]) -> dict[str, Any]:
    first = layouts[0]
    return {
        "model": first.model,
        "tp_size": first.tp_size,
        "pp_size": first.pp_size,
        "ranks": len(layouts),
        "groups": [
            {
                "name": g.name,
                "kind": g.kind,
                "tokens_per_block": g.block_size if g.kind == "tokens" else None,
                "kernel_blocks": g.ratio,
                "window": g.window,
                "token_shards": _values(first.shard(i), ("size", "interleave")),
                "layers": len({v.layer for x in layouts for v in x.views if v.group == i}),
                "parts": _parts(first, i),
            }
            for i, g in enumerate(first.groups)
        ],
    }


def _values(shard: TokenShard, names: Sequence[str] = ("size", "rank", "interleave")) -> dict[str, int] | None:
    return {name: getattr(shard, name) for name in names} if shard.size > 1 else None


def _parts(layout: Layout, group: int) -> list[dict[str, Any]]:
    """List the parts of a kernel block, from this rank's first layer of the group."""
    views = [v for v in layout.views if v.group == group]
    return [
        {"name": p.name, "dtype": p.dtype, "dims": {d.name: d.size for d in p.dims}, "axis": p.axis, "extent": p.extent}
        for v in views
        if v.layer == views[0].layer
        for p in v.parts
    ]


def _place(layout: Layout) -> str:
    return _named(layout, layout.pp_stage, layout.tp_rank)


def _named(layout: Layout, stage: int, rank: int) -> str:
    return f"pp{stage}/tp{rank}" if layout.pp_size > 1 else f"tp{rank}"


def _rank(layout: Layout, answered: Sequence[Layout], num_tokens: int, cached: int) -> dict[str, Any]:
    row: dict[str, Any] = {"rank": _place(layout), "releases": [_place(x) for x in answered]}
    row |= {"refused": [], "warnings": [], "reads": [], "bytes": 0, "bytes_read": 0}
    for other in answered:
        row["refused"] += [_refusal(_place(other), d) for d in compare(layout, other)]
    if row["refused"]:
        return row
    try:
        needed = [(other, share) for other, share in _shares(layout, answered) if share]
        ways = [
            [PeerTables(layout, other, share, itertools.count(1), costs, packs(other)) for other, share in needed]
            for costs in (TYPICAL if packs(layout) else None, None)
        ]
        # Blocks lie in runs on both sides: the best that an allocator gives.
        offers = [_lists("prefill", other, num_tokens, 0) for other in answered]
        mine = check_block_ids(layout, _lists("decode", layout, num_tokens, cached))
        lists = BlockLists(mine, [BlockRuns(first, runs_of(ids)) for first, ids in offers[0]], num_tokens)
        plans, usual = ([plan_read(peer, lists) for peer in peers] for peers in ways)
    except (LayoutError, PlanRefused, RemoteTooShort) as exc:
        differences = exc.differences if isinstance(exc, NotCovered) else [Difference(str(exc), "", "")]
        row["refused"] = [_refusal("", d) for d in differences]
        return row
    for (other, share), peer, plan, direct in zip(needed, ways[0], plans, usual, strict=True):
        if plan.num_descriptors:
            row["warnings"] += peer.warnings
            row["reads"].append(_read(_place(other), peer, plan, direct, share))
    for name in ("bytes", "bytes_read"):
        row[name] = sum(read[name] for read in row["reads"])
    return row


def _shares(layout: Layout, answered: Sequence[Layout]) -> Iterator[tuple[Layout, Sequence[Share]]]:
    """Yield what is read of each rank, as an engine chooses: of the predicted ranks, if they have everything."""
    size, shards = answered[0].tp_size, answered[0].num_token_shards
    first = predicted(layout, sorted({x.tp_rank for x in answered}), size, shards)
    some = [x for x in answered if x.tp_rank in first]
    try:
        found = assign(layout, some)
    except NotCovered:
        some, found = list(answered), assign(layout, answered)
    yield from zip(some, found, strict=True)


def _refusal(remote: str, d: Difference) -> dict[str, Any]:
    return {"remote": remote, "field": d.field, "local": d.local, "remote_value": d.remote, "remedy": d.remedy}


def _lists(side: str, layout: Layout, num_tokens: int, first: int) -> list[tuple[int, list[int | None]]]:
    """Return block ids for every group; groups that share memory take theirs from one pool."""
    if first >= num_tokens:
        return [(first, []) for _ in layout.groups]
    pool_of = pools(layout)
    nulls = grouped(zip(pool_of, (group.null_block for group in layout.groups), strict=True))
    taken = dict.fromkeys(pool_of, 0)
    out: list[tuple[int, list[int | None]]] = []
    for pool, group in zip(pool_of, layout.groups, strict=True):
        start, count = first // group.block_size, -(-num_tokens // group.block_size)
        keep = max(0, num_tokens - group.window) if group.window else 0
        if group.kind == "state":
            keep = num_tokens - 1
        null = max(keep // group.block_size, start)
        begin = taken[pool]
        end = begin + count - null
        for placeholder in sorted(set(nulls[pool])):
            end += begin <= placeholder < end
        if end > group.num_blocks:
            raise ConfigError(
                f"--tokens {num_tokens} does not fit: group {group.name!r} of {side} {_place(layout)} declares "
                f"{group.num_blocks} blocks of {group.block_size} tokens, but {count - null} are needed"
                f"{f' beside the {begin} of groups in the same memory' if begin else ''}; use fewer --tokens, or write "
                f"the layout with more --num-blocks"
            )
        ids = [i for i in range(begin, end) if i not in nulls[pool]]
        taken[pool] = end
        out.append((first, [None] * (null - start) + ids))
    return out


def _read(name: str, peer: PeerTables, plan: Plan, direct: Plan, shares: Sequence[Share]) -> dict[str, Any]:
    groups = [_read_group(peer, (x.local_index, x.remote_index), plan, direct, shares) for x in peer.group_pairs]
    read = [g for g in groups if g["descriptors"]]
    sums = {key: sum(g[key] for g in read) for key in ("bytes", "bytes_read", *itertools.chain(*BLOCKS.values()))}
    return {"remote": name, **sums, "groups": read}


def _seconds(sections: Sequence[Section]) -> float:
    """Return the time of reads by typical costs of this host's transports; every post's own cost is left out."""
    seconds = 0.0
    for section in sections:
        table, blocks = section.table, len(section.local)
        merged, placed = section.num_merged()[1], table.placed_bytes * blocks
        if table.pack_bytes:
            seconds += TYPICAL.packed(merged, 0, placed, placed)
        else:
            seconds += TYPICAL.of(merged, 0, table.block_bytes * blocks, placed if table.boxes else 0)
    return seconds


def _read_group(
    peer: PeerTables, pair: tuple[int, int], plan: Plan, direct: Plan, shares: Sequence[Share]
) -> dict[str, Any]:
    mine, usual = (Plan(tuple(s for s in p.sections if s.table.span[:2] == pair)) for p in (plan, direct))
    config = PullConfig()
    is_packed = any(s.table.pack_bytes for s in mine.sections)
    posts, merged = mine.count_posts(config.max_post_bytes, config.max_post_descriptors)
    # Every second id has no neighbour, so that nothing merges.
    apart = Plan(tuple(Section(s.table, 2 * s.local, s.remote) for s in mine.sections))
    ranges: dict[tuple[str, int, int, str, int], set[str]] = {}
    for s in shares:
        if (s.local_view.group, s.remote_view.group) == pair:
            part = s.local_part
            ranges.setdefault((part.name, s.lo, s.hi, part.axis, part.extent), set()).add(s.local_view.layer)
    return {
        "group": pair[0],
        "parts": [
            {"part": name, "axis": axis, "range": [lo, hi], "extent": extent, "layers": len(layers)}
            for (name, lo, hi, axis, extent), layers in ranges.items()
        ],
        "bytes": mine.num_bytes,
        "bytes_read": sum(
            (s.table.placed_bytes if s.table.pack_bytes else s.table.block_bytes) * len(s.local) for s in mine.sections
        ),
        "pieces_per_block": max((s.table.num_rows for s in mine.sections), default=0),
        "kinds_of_cuts": len({s.table.table_id for s in mine.sections}),
        "descriptors": mine.num_descriptors,
        "descriptors_in_runs": merged,
        "way": "packed" if is_packed else "staged" if mine.is_staged else "direct",
        "expected_s": _seconds(mine.sections),
        "expected_direct_s": _seconds(usual.sections),
        "posts": posts,
        "posts_scattered": apart.count_posts(config.max_post_bytes, config.max_post_descriptors)[0],
        "token_shards": {"remote": _values(peer.remote.shard(pair[1])), "local": _values(peer.local.shard(pair[0]))},
    }


# -- for people -------------------------------------------------------------------------------------------------


def show(report: dict[str, Any], console: Console) -> None:
    report = printable(report)
    for role, side in (("prefill (remote)", report["remote"]), ("decode (local)", report["local"])):
        stages = f", pp {side['pp_size']}" if side["pp_size"] > 1 else ""
        whole = side["tp_size"] * side["pp_size"]
        some = "" if side["ranks"] == whole else f"; {side['ranks']} of {whole} ranks are in this file"
        console.print(f"[bold]{role}[/bold]: {side['model'] or 'a model'}, tp {side['tp_size']}{stages}{some}")
        for group in side["groups"]:
            of = (
                "one state per request" if group["kind"] == "state" else f"{group['tokens_per_block']} tokens per block"
            )
            ratio = f" of {group['kernel_blocks']} kernel blocks" if group["kernel_blocks"] > 1 else ""
            if (shard := group["token_shards"]) is not None:
                of += f", shared by {shard['size']} ranks by {shard['interleave']}"
            layers = f"{group['layers']} layer{'s' if group['layers'] > 1 else ''}"
            console.print(f"  group {group['name']}: {layers}, {of}{ratio}")
            for shape, names in grouped((_shape(part), part["name"]) for part in group["parts"]).items():
                console.print(f"    {', '.join(names)}: {shape}")
    console.print()
    if not report["plannable"]:
        _show_refusal(report, console)
        _show_problems(report, console)
        return
    cached = f", of which {report['cached']:,} are on the decode side already" if report["cached"] else ""
    plural = "s" if report["tokens"] > 1 else ""
    console.print(f"[bold]A request of {report['tokens']:,} token{plural}[/bold]{cached}")
    ranges: list[tuple[tuple[str, str, str], str]] = []
    costs: list[tuple[tuple[str, ...], tuple[str, str]]] = []
    for rank in report["ranks"]:
        name, groups = rank["rank"], [(read["remote"], group) for read in rank["reads"] for group in read["groups"]]
        for remote, group in groups:
            number, counts = str(group["group"]), (f"{group[n]:,}" for n in COUNTS)
            ranges.append(((remote, number, _what(group)), name))
            costs.append(((number, size(group["bytes"]), *counts), (name, remote)))
        ranges += [] if rank["reads"] else [(("none", "", ""), name)]
    read = [(_names(names), *cells) for cells, names in grouped(ranges).items()]
    print_table(console, ("decode", "reads", "group", "what"), read, texts=(1,), wrapped=(0, 3), is_markup=True)
    if costs:
        console.print("\n[bold]Each of these reads[/bold]")
        heads = ("decode", "reads", "group", "bytes", "pieces per block", "descriptors", "if in runs", "posts")
        alike = grouped(costs).items()
        rows = [(*(_names(names) for names in zip(*pairs, strict=True)), *cells) for cells, pairs in alike]
        print_table(console, heads, rows, wrapped=(0, 1), is_markup=True)
    for legend in LEGEND:
        console.print(f"  {legend}", style="dim")
    _show_ways(report, console)
    _show_bounds(report, console)
    _show_head_starts(report["head_starts"], console)
    console.print()
    console.print("[bold]Releases[/bold]: a prefill rank's blocks are free once these decode ranks have released them")
    read_by = {r["rank"]: {x["remote"] for x in r["reads"]} for r in report["ranks"]}
    for name, readers in report["owed"].items():
        kinds = grouped((name in read_by[d] if d in read_by else None, d) for d in readers)
        idle = f" (which read{'s' * (len(kinds.get(False, ())) == 1)} nothing from it)"
        notes = {True: "", None: " (not in this file)", False: idle}
        # A note covers all names before it, so ranks without one come last.
        order = sorted(kinds.items(), key=lambda each: each[0] is not False)
        names = [f"{_names(some)}{notes[kind]}" for kind, some in order]
        console.print(f"  prefill {name}: decode {', '.join(names)}")
    _show_problems(report, console)
    for warning in dict.fromkeys(w for r in report["ranks"] for w in r["warnings"]):
        console.print(f"[yellow]warning[/yellow]: {warning}")


def _shape(part: dict[str, Any]) -> str:
    dims = (
        f"{n} {long:,}" + (f" of {part['extent']:,}" if n == part["axis"] else "") for n, long in part["dims"].items()
    )
    return f"{part['dtype']} ({' x '.join(dims)})"


def _show_ways(report: dict[str, Any], console: Console) -> None:
    found: dict[str, Counter[str]] = {way: Counter() for way in WAYS}
    for group in [g for rank in report["ranks"] for read in rank["reads"] for g in read["groups"]]:
        if group["way"] in WAYS:
            over = group["bytes_read"] / group["bytes"]
            more = f", reading {over:.1f} bytes for each that is needed" if over > 1 else ""
            ms, direct_ms = group["expected_s"] * 1e3, group["expected_direct_s"] * 1e3
            line = f"group {group['group']}: {ms:,.2f} ms{more}; direct reads would take {direct_ms:,.2f} ms"
            found[group["way"]][line] += 1
    for way, lines in found.items():
        if lines:
            console.print(f"\n[bold]{WAYS[way]}")
        for text, number in lines.items():
            console.print(f"  {text}{f' ({number} rows)' if number > 1 else ''}")
    if any(found.values()):
        console.print("  expected on one host, with KV in its memory; KV on GPUs is read directly", style="dim")


def _bound(row: dict[str, Any]) -> tuple[str, ...]:
    times = (f"{row[f'{name}_s'] * 1e3:,.2f}" for name in bound.PARTS)
    reached = f"{row['requests_per_s']:,.0f}", f"{row['share_of_wire']:.0%}"
    return row["side"], row["blocks"], *times, row["limit"], *reached


def _show_bounds(report: dict[str, Any], console: Console) -> None:
    if not report["bounds"]:
        return
    alike = grouped((_bound(row), row["rank"]) for row in report["bounds"])
    console.print(
        f"\n[bold]Bound over RDMA, on paper[/bold]: every rank has a device of {report['nic_gbit_per_s']:g} Gbit/s"
    )
    heads = ("ranks", "blocks", *(f"{name} ms" for name in bound.PARTS), "limit", "requests/s", "share")
    rows = [(f"{side} {_names(names)}", *cells) for (side, *cells), names in alike.items()]
    print_table(console, heads, rows, texts=(1, 6), wrapped=(0,), is_markup=True)
    console.print(f"  {BOUND_LEGEND}", style="dim")


def _show_head_starts(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for it in rows[:1]:
        rate = f"{it['chunks']} chunks of {it['chunk_tokens']:,} tokens at {it['tokens_per_s']:,g} tokens/s"
        console.print(f"\n[bold]Head start, on paper[/bold]: {rate}, {it['compute_s'] * 1e3:,.1f} ms")
    for it in rows:
        saved = f"{it['saved_s'] * 1e3:,.1f} ms, {it['share']:.1%} of the time to the first token"
        console.print(f"  blocks {it['blocks']}: read in {it['read_s'] * 1e3:,.1f} ms; it saves at most {saved}")


def _show_problems(report: dict[str, Any], console: Console) -> None:
    for problem in report["problems"]:
        console.print(f"[red]problem[/red]: {problem}")


def _show_refusal(report: dict[str, Any], console: Console) -> None:
    console.print("[bold red]Refused at the handshake[/bold red]")
    refused = [(rank["rank"], d) for rank in report["ranks"] for d in rank["refused"]]
    alike = grouped(
        ((d["field"], _shortened(d["local"]), _shortened(d["remote_value"])), (rank, d["remote"]))
        for rank, d in refused
    )
    for (field, mine, theirs), pairs in alike.items():
        here, there = (_names([name for name in names if name]) for names in zip(*pairs, strict=True))
        values = f": {mine} here, {theirs} there" if mine or theirs else ""
        console.print(f"  decode {here}{f', prefill {there}' if there else ''}: {field}{values}")
    for remedy in dict.fromkeys(d["remedy"] for _, d in refused if d["remedy"]):
        console.print(f"  what to do: {remedy}")


def _shortened(value: object) -> str:
    return ", ".join(str(x) for x in value) if isinstance(value, list | tuple) else str(value)


def _names(names: Iterable[str]) -> str:
    """Join the names of ranks, with neighbours as a range, such as `tp0-3, tp6`."""
    runs: list[tuple[str, int, int]] = []
    for name in dict.fromkeys(names):
        stage, number = name.split("tp")
        if runs and (runs[-1][0], runs[-1][2] + 1) == (stage, int(number)):
            runs[-1] = (*runs[-1][:2], int(number))
        else:
            runs.append((stage, int(number), int(number)))
    said = [f"{stage}tp{first}{f'-{last}' if last > first else ''}" for stage, first, last in runs]
    return ", ".join(said) if len(said) <= 4 else f"{', '.join(said[:3])}, ... {said[-1]}"


def _what(group: dict[str, Any]) -> str:
    """Return one line per range, with all parts that are cut in this way, and the shares of tokens that both hold."""
    sides = [(word, group["token_shards"][x]) for word, x in (("", "remote"), ("here ", "local"))]
    tokens = ", ".join([f"{word}{TokenShard(0, **shard)}" for word, shard in sides if shard])
    lines = grouped(((x["axis"], *x["range"], x["extent"], x["layers"]), x["part"]) for x in group["parts"])
    out = []
    for (axis, lo, hi, extent, layers), names in lines.items():
        span = f"{lo}-{hi - 1}" if hi - lo > 1 else f"{lo}"
        where = ", ".join(filter(None, (f"{axis} {span} of {extent}" if axis else "", tokens))) or "whole"
        out.append(f"{', '.join(names)}: {where} ({layers} layer{'s' if layers > 1 else ''})")
    return "\n".join(out)
