"""The remote ranks that a rank reads, the parts that it reads of each, and the ranks that it releases.

**Releases** must be known before ranks have met, because a lease has to know all readers that it is owed, including
those that read nothing. So they depend on sizes alone: decode rank `d` of `T_D` answers for prefill rank `p` of `T_P`
if and only if `[d/T_D, (d+1)/T_D)` overlaps `[p/T_P, (p+1)/T_P)`. Neighbouring prefill ranks that share tokens count as
one. Every decode stage answers for every prefill stage.

**Reads** are known after the handshakes: `assign` covers our ranges with those of the remote ranks. Ranks with the same
range and different tokens are together what one rank is otherwise. Among replicas the first is read; where ranks share
tokens, each reader takes its own by place, so that what is whole there is not read from one rank by all.
`predicted` names the ranks to shake hands with first. `compare` refuses layouts that cannot be planned at all. Views
and parts are matched by (layer, part); a layer is matched by its own name and by its aliases.

**Guesses are settled** (`Layout.guessed_axis`). One entry on each of `T` ranks means that the whole axis has a divisor
of `T` entries. If ranks of the other side hold several, its extent is known, and tells which entry each of ours has.
If both sides hold one, ranks that overlap hold the same entry, whatever the extent is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import structs

from asynckv.errors import LayoutError
from asynckv.geometry.layout import TOKEN, Dim, Group, Layout, Part, TokenShard, View, shard

MAX_DIFFERENCES = 16
WHOLE = 0, 0  # the range of a part without an axis, which every rank holds whole
COLUMN = "column"  # the dim of a convolution's state along its last inputs
COLUMNS = "columns of the convolution"
SAME_MODEL = "give both engines the same model, quantisation and speculative decoding"

REMEDIES = {
    "model": "pair only engines of one model; if they serve the same one, give both layouts the same model=",
    "layers": "give both engines the same model, and the same names of layers (or aliases)",
    "parts": "declare the same parts in both engines",
    "kind": "declare the layer in both engines as the same kind of cache: for tokens, or as a state",
    "window": "give the reading engine a sliding window, and not a longer one than the lending engine keeps",
    "dtype": "give both engines the same dtype of the KV cache (vLLM: --kv-cache-dtype)",
    "itemsize": SAME_MODEL,
    "sharded axis": "declare the whole model's heads (num_heads, extent) in both engines, not one rank's",
    "tokens_per_entry": SAME_MODEL,
    "kernel block size": "give both engines the same --block-size and attention backend",
    COLUMNS: (
        "speculative decoding: a state has kernel size - 1 + num_speculative_tokens columns; give both engines the "
        "same num_speculative_tokens (vLLM: --speculative-config)"
    ),
    "dims": SAME_MODEL,
    "held ranges": "name all ranks of the lending engine in its PrefillRanks; together they hold the whole axis",
    "held tokens": "ranks that share tokens hold the same range, with one size and one interleave; name all of them in "
    "the PrefillRanks of the lending engine",
}
"""Remedies of differences, by the words that their fields begin with."""


def _overlapping(rank: int, size: int, other_size: int) -> range:
    """Return the ranks of a group of `other_size` with a share of the unit interval that overlaps ours."""
    return range(rank * other_size // size, -(-(rank + 1) * other_size // size))


def remote_ranks(rank: int, size: int, other_size: int, shards: int = 1) -> range:
    """Return the prefill ranks that a decode rank must release, even if it does not read them.

    Of the `other_size` prefill ranks each `shards` neighbours share tokens. They count as one, because a reader may
    need all of them.
    """
    found = _overlapping(rank, size, other_size // shards)
    return range(found.start * shards, found.stop * shards)


def owed_readers(rank: int, size: int, other_size: int, shards: int = 1) -> range:
    """Return the decode ranks that owe a prefill rank a release; of `size` prefill ranks `shards` share tokens."""
    return _overlapping(rank // shards, size // shards, other_size)


class Difference(NamedTuple):
    field: str
    local: object
    remote: object

    def __str__(self) -> str:
        return f"{self.field}: local {self.local}, remote {self.remote}"

    @property
    def remedy(self) -> str:
        return next((remedy for field, remedy in REMEDIES.items() if self.field.startswith(field)), "")


def in_words(differences: Iterable[Difference]) -> str:
    """Write differences for an error, each remedy after the first one that it is for."""
    told, said = set[str](), []
    for each in differences:
        said.append(str(each) if each.remedy in told else f"{each} ({each.remedy})")
        told.add(each.remedy)
    return "; ".join(said)


class NotCovered(LayoutError):
    def __init__(self, differences: Sequence[Difference]) -> None:
        super().__init__(in_words(differences))
        self.differences = tuple(differences)


class Share(NamedTuple):
    """The range of one part that one rank reads from one remote rank: `[lo, hi)` of the axis; 0, 0 if not sharded."""

    local_view: View
    remote_view: View
    local_part: Part
    remote_part: Part
    lo: int
    hi: int


def compare(local: Layout, remote: Layout) -> tuple[Difference, ...]:
    """Return every field in which two checked layouts differ in a way that prevents a plan."""
    found: dict[tuple[str, str, str], list[str]] = {}  # (field, local, remote) -> the layers with this difference
    out: list[Difference] = []
    if local.model != remote.model:
        is_named = local.model and remote.model
        field = "model" if is_named else "model (give both layouts its name)"
        out.append(Difference(field, local.model or "without a name", remote.model or "without a name"))
    local_layers, remote_layers = _layers(local), _layers(remote)
    only_local, only_remote = strange_layers(local, remote_layers), strange_layers(remote, local_layers)
    if remote.pp_size > 1:
        only_local = []  # another remote stage may have them; `assign` compares all stages
    # Without stages of our own, every layer of every remote stage must be one of ours.
    if local.pp_size == 1 and (only_local or only_remote):
        out.append(Difference("layers only on one side", _some(only_local), _some(only_remote)))
    for layer, local_parts in local_layers.items():
        if layer in remote_layers:
            differing = _compare_layers(local_parts, remote_layers[layer])
            for field, local_value, remote_value in differing:
                found.setdefault((field, str(local_value), str(remote_value)), []).append(layer)
    for (field, in_local, in_remote), layers in found.items():
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        out.append(Difference(f"{field} of layer {layers[0]!r}{more}", in_local, in_remote))
    return tuple(out[:MAX_DIFFERENCES])


class _Spot(NamedTuple):
    view: View
    part: Part
    layout: Layout

    @property
    def group(self) -> Group:
        return self.layout.groups[self.view.group]


_Parts = dict[str, _Spot]  # the parts of one layer by name


def _layers(layout: Layout) -> dict[str, _Parts]:
    """Return the parts of every layer and alias. A layer may lie in several views."""
    out: dict[str, _Parts] = {}
    for view in layout.views:
        parts = out.setdefault(view.layer, {})
        for part in view.parts:
            parts[part.name] = _Spot(view, part, layout)
    for alias, layer in layout.aliases:
        out[alias] = out[layer]
    return out


def layer_names(layout: Layout) -> dict[str, list[str]]:
    out = {view.layer: [view.layer] for view in layout.views}
    for alias, layer in layout.aliases:
        out[layer].append(alias)
    return out


def strange_layers(layout: Layout, others: Container[str]) -> list[str]:
    return [layer for layer, names in layer_names(layout).items() if not any(name in others for name in names)]


def _some(names: Iterable[str]) -> object:
    names = sorted(names)
    return (names if len(names) <= 8 else [*names[:8], f"... {len(names) - 8} more"]) or "none"


def _compare_layers(local_parts: _Parts, remote_parts: _Parts) -> Iterator[tuple[str, object, object]]:
    names = local_parts.keys(), remote_parts.keys()
    if names[0] != names[1]:
        packed = {"kv"} in names and {"k", "v"} in names
        hint = " (a packed tensor is k and v, if its order names a dim 'kv')" if packed else ""
        yield f"parts{hint}", _some(local_parts), _some(remote_parts)
    told = set()
    for name in local_parts:
        if name not in remote_parts:
            continue
        local, remote = local_parts[name], remote_parts[name]
        local_group, remote_group = local.group, remote.group
        pair = (local.view.group, remote.view.group)
        if local_group.kind != remote_group.kind:
            if pair not in told:
                yield "kind", local_group.kind, remote_group.kind
        elif remote_group.window and not 0 < local_group.window <= remote_group.window and pair not in told:
            yield "window", local_group.window or "none", remote_group.window
        told.add(pair)
        if local_group.kind == remote_group.kind:
            for field, local_value, remote_value in _compare_parts(local, remote):
                yield f"{field} of part {name!r}", local_value, remote_value


def _said_as(spot: _Spot, other: _Spot) -> Part:
    """Describe a part as the other side does: with a settled extent, or, if every rank holds it whole, as sharded."""
    part, twin = spot.part, other.part
    differ = part.extent != twin.extent or spot.layout.token_shards or other.layout.token_shards
    if part.axis and part.axis == twin.axis and differ and _is_guess(spot, other):
        # Neighbours that share tokens hold the same entry, so they count as one.
        shards = [each.layout.shard(each.view.group).size for each in (spot, other)]
        size, others = spot.layout.tp_size // shards[0], other.layout.tp_size // shards[1]
        extent = math.gcd(size, others) if _is_guess(other, spot) else twin.extent
        if size % extent:
            return part
        lo = spot.layout.tp_rank // shards[0] * extent // size
        return structs.replace(part, held=(lo, lo + 1), extent=extent)
    if part.axis or not twin.axis:
        return part
    dims = {dim.name: dim.size for dim in part.dims}
    if dims.get(twin.axis, 1) != twin.extent:
        return part
    # A dim of one entry may be left out, because it is never stepped along.
    more = () if twin.axis in dims else (Dim(twin.axis, 1, part.itemsize),)
    return structs.replace(part, dims=part.dims + more, axis=twin.axis, held=(0, twin.extent), extent=twin.extent)


def _is_guess(spot: _Spot, other: _Spot) -> bool:
    """Return True if a part's range is a guess: both engines of a model guess alike, so that one of them says it."""
    lo, hi = spot.part.held
    said = spot.layout.guessed_axis, other.layout.guessed_axis
    return hi - lo == 1 and spot.group.kind == "tokens" and spot.part.axis in said


def _compare_parts(one: _Spot, other: _Spot) -> Iterator[tuple[str, object, object]]:
    local, remote = _said_as(one, other), _said_as(other, one)
    if local.dtype != remote.dtype:
        yield "dtype", local.dtype, remote.dtype
    elif local.itemsize != remote.itemsize:
        yield "itemsize", local.itemsize, remote.itemsize
    if (local.axis, local.extent if local.axis else 0) != (remote.axis, remote.extent if remote.axis else 0):
        yield "sharded axis", _axis(local), _axis(remote)
    if local.tokens_per_entry != remote.tokens_per_entry:
        yield "tokens_per_entry", local.tokens_per_entry, remote.tokens_per_entry
    sizes = one.group.kernel_size, other.group.kernel_size
    if one.group.kind == "tokens" and not (local.has_tokens and remote.has_tokens) and sizes[0] != sizes[1]:
        yield "kernel block size (one entry covers a whole kernel block)", *sizes
    mine, theirs = _common_dims(local), _common_dims(remote)
    if (columns := mine.pop(COLUMN, 1)) != (others := theirs.pop(COLUMN, 1)):
        yield COLUMNS, columns, others
    if mine != theirs or local.has_tokens != remote.has_tokens:
        yield "dims", _dims(local), _dims(remote)


def _common_dims(part: Part) -> dict[str, int]:
    """Return the dims that must be equal on both sides: all except tokens, the sharded axis and dims of one entry."""
    return {d.name: d.size for d in part.dims if d.size > 1 and d.name not in (TOKEN, part.axis)}


def _dims(part: Part) -> str:
    # Sorted, because the order of dims in memory is no difference.
    return ", ".join(sorted(d.name if d.name in (TOKEN, part.axis) else f"{d.name}={d.size}" for d in part.dims))


def _axis(part: Part) -> str:
    return f"{part.axis!r} of {part.extent}" if part.axis else "none"


def predicted(layout: Layout, ranks: Sequence[int], size: int, shards: int = 1) -> list[int]:
    """Return the remote `ranks` that will be read if they share heads in the usual way; otherwise all of them.

    Of neighbours that share tokens all are named, because their interleave is not known before they have met.
    """
    chosen, place = set[int](), layout.tp_rank if shards > 1 or layout.token_shards else 0
    theirs = [TokenShard(0, shards, rank % shards) for rank in ranks]
    for axis, mine, extent in {(p.axis, p.held, p.extent) for v in layout.views for p in v.parts}:
        try:
            held = [shard(extent, rank, size) if axis else WHOLE for rank in ranks]
        except LayoutError:
            return list(ranks)
        for found, _, _ in _cover_tokens(mine if axis else WHOLE, held, TokenShard(0), theirs, place):
            if not found:
                return list(ranks)
            chosen.update([ranks[i] for i in found])
    return sorted(chosen)


def _cover(lo: int, hi: int, held: Sequence[tuple[int, int]]) -> Iterator[tuple[int | None, int, int]]:
    """Cover `[lo, hi)` from the left, each time by the range that reaches farthest: `(index or None, start, end)`."""
    ahead = sorted(range(len(held)), key=lambda i: held[i][0], reverse=True)
    index, reach = None, lo
    while lo < hi:
        while ahead and held[ahead[-1]][0] <= lo:
            i = ahead.pop()
            if held[i][1] > reach or (held[i][1] == reach and index is not None and i < index):
                index, reach = i, held[i][1]
        if reach > lo:
            at, end = index, min(reach, hi)
        else:
            at, end = None, min(held[ahead[-1]][0] if ahead else hi, hi)
        yield at, lo, end
        lo = end


def _cover_tokens(
    held: tuple[int, int], others: Sequence[tuple[int, int]], mine: TokenShard, theirs: Sequence[TokenShard], place: int
) -> Iterator[tuple[Sequence[int], int, int]]:
    """Cover a range of an axis and our tokens of it: `(indices of ranks that together hold them, start, end)`.

    A part without an axis is `WHOLE` on every rank. No index is given for what no ranks hold.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for at, other in enumerate(others):
        alike.setdefault(other, []).append(at)
    chosen = {
        other: [ranks[i] for i in holders(mine, [theirs[at] for at in ranks], place)] for other, ranks in alike.items()
    }
    whole = [(other, ranks) for other, ranks in chosen.items() if ranks]
    if held == WHOLE:
        yield (whole[0][1] if whole else ()), 0, 0
    for number, lo, hi in _cover(*held, [other for other, _ in whole]):
        yield (() if number is None else whole[number][1]), lo, hi


def holders(mine: TokenShard, theirs: Sequence[TokenShard], place: int) -> list[int]:
    """Return the indices of ranks that together hold all tokens that we hold; none if one of them is missing.

    Args:
        theirs: The shares of remote ranks that are alike otherwise. Several may be equal; then they are replicas.
        place: The number of the replica that is taken, modulo their number.
    """
    ways: dict[tuple[int, int], dict[int, list[int]]] = {}
    for at, each in enumerate(theirs):
        ways.setdefault((each.size, each.interleave), {}).setdefault(each.rank, []).append(at)
    for (size, interleave), replicas in sorted(ways.items()):
        needed = []
        for rank in range(size):
            if _meet(mine, TokenShard(0, size, rank, interleave)):
                if rank not in replicas:
                    break  # at once, because an untrusted peer may say any size
                needed.append(rank)
        else:
            return [replicas[rank][place % len(replicas[rank])] for rank in needed]
    return []


def _meet(one: TokenShard, other: TokenShard) -> bool:
    """Return True if two ranks have a token in common."""
    # One holds `one.rank * one.interleave + i` modulo its period for every `i < one.interleave`, and so does the other.
    # Two such numbers can be the same token if they differ by a multiple of what the periods have in common.
    common = math.gcd(one.size * one.interleave, other.size * other.interleave)
    most = (one.rank + 1) * one.interleave - 1 - other.rank * other.interleave
    least = one.rank * one.interleave - (other.rank + 1) * other.interleave + 1
    return most // common * common >= least


def _range(tp_rank: int, part: Part, shard: TokenShard) -> str:
    held = f" [{part.held[0]}, {part.held[1]})" if part.axis else ""
    return f"tp{tp_rank}{held}" + (f" {shard}" if shard.size > 1 else "")


def assign(local: Layout, remotes: Sequence[Layout], groups: Container[int] | None = None) -> list[tuple[Share, ...]]:
    """Cover all that this rank holds with ranges of the remote ranks; return per remote rank the shares read of it.

    All layouts must be checked and comparable. `groups` are our groups with a wanted block. Raise `NotCovered` if a
    layer or a range is missing.
    """
    place = local.tp_rank if any(each.token_shards for each in (local, *remotes)) else 0
    held_by, names = [_layers(remote) for remote in remotes], layer_names(local)
    covers: dict[tuple[object, ...], list[tuple[Sequence[int], int, int]]] = {}  # for layers that are alike
    out: list[list[Share]] = [[] for _ in remotes]
    missing: dict[str, None] = {}
    gaps: dict[tuple[str, str, str], list[str]] = {}
    for view in local.views:
        if groups is not None and view.group not in groups:
            continue
        for part in view.parts:
            spots = _spots(held_by, names[view.layer], part.name)
            if not spots:
                missing[view.layer] = None
                continue
            part, twins = _said_alike(_Spot(view, part, local), spots)
            if part.axis and (
                other := [twin for *_, twin in twins if (twin.axis, twin.extent) != (part.axis, part.extent)]
            ):
                # Each fits a part that is whole here, but not the others: they cut it along different axes.
                what = f"sharded axis of layer {view.layer!r} part {part.name!r}"
                raise NotCovered([Difference(what, _axis(part), _axis(other[0]))])
            mine, theirs = local.shard(view.group), [remotes[i].shard(v.group) for i, v, _ in twins]
            held = [each.held if part.axis else WHOLE for each in (part, *[twin for *_, twin in twins])]
            if (key := (*held, mine, *theirs)) not in covers:
                covers[key] = list(_cover_tokens(held[0], held[1:], mine, theirs, place))
            for ranks, lo, hi in covers[key]:
                for at in ranks:
                    i, remote_view, twin = twins[at]
                    out[i].append(Share(view, remote_view, part, twin, lo, hi))
                if not ranks:
                    has = [_range(remotes[i].tp_rank, p, s) for (i, _, p), s in zip(twins[:8], theirs, strict=False)]
                    gap = f"[{lo}, {hi}) of {part.extent} along {part.axis!r} of" if part.axis else ""
                    is_shared = any(each.size > 1 for each in (mine, *theirs))
                    wants = f"{gap} part {part.name!r}" + (f", {mine}" if is_shared else "")
                    what = "held tokens" if is_shared else "held ranges"
                    gaps.setdefault((what, wants.strip(), ", ".join(has)), []).append(view.layer)
    if differences := _gaps(local, remotes, held_by, missing, gaps):
        raise NotCovered(differences[:MAX_DIFFERENCES])
    return [tuple(shares) for shares in out]


def _spots(held_by: Sequence[dict[str, _Parts]], names: Sequence[str], part: str) -> list[tuple[int, _Spot]]:
    """Return the remote ranks that have a part of a layer, and where, by the first of its names that any has."""
    for name in names:
        found = [(i, layers.get(name, {}).get(part)) for i, layers in enumerate(held_by)]
        if spots := [(i, spot) for i, spot in found if spot is not None]:
            return spots
    return []


def _said_alike(mine: _Spot, spots: Sequence[tuple[int, _Spot]]) -> tuple[Part, list[tuple[int, View, Part]]]:
    """Return a part as all remote ranks say it, and theirs as this rank says it."""
    for _, spot in spots:
        mine = mine._replace(part=_said_as(mine, spot))
    return mine.part, [(i, spot.view, _said_as(spot, mine)) for i, spot in spots]


def _gaps(
    local: Layout,
    remotes: Sequence[Layout],
    held_by: Sequence[dict[str, _Parts]],
    missing: Collection[str],
    gaps: Mapping[tuple[str, str, str], Sequence[str]],
) -> list[Difference]:
    """Return what no remote rank holds: wanted layers, ranges, and other layers of ours if all stages are here."""
    differences = [Difference("layers that no remote rank has", _some(missing), "none")] if missing else []
    for (what, gap, ranks), layers in gaps.items():
        more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
        differences.append(Difference(f"{what} of layer {layers[0]!r}{more}", f"needs {gap}", f"holds {ranks}"))
    has_all_stages = local.pp_size == 1 and len({remote.pp_stage for remote in remotes}) == remotes[0].pp_size
    if has_all_stages and not missing:
        known = {layer for layers in held_by for layer in layers}
        if strange := strange_layers(local, known):
            differences.append(Difference("layers only on one side", _some(strange), "none"))
    return differences
