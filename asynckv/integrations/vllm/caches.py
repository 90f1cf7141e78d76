"""The cut of layers' caches into the parts that a layout declares.

- `Attention`: a tensor `[kernel block, head, entry, content]`, strided in any order. It is one part, sharded by heads.
- `states`: pages `[block, 1, 1, byte]` that hold several arrays, each sharded along its own axis.
- `Opaque`: pages or whole kernel blocks of unknown structure. They move whole, and only between equal ranks of equal
  tensor-parallel sizes. An axis named `rank` makes the handshake refuse others.

Parts are views of the given tensor; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any

from asynckv.edges.torch import TensorPart, as_bytes
from asynckv.geometry.layout import ITEMSIZE, TOKEN

if TYPE_CHECKING:
    from asynckv.edges.torch import Dtype, Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A worker's place: among the ranks that cut layers (TP), in the pipeline, and in context parallelism.

    `pcp_size` groups of TP ranks share the computation of a prefill. They hold replicas, unless DCP goes over all of
    them. `dcp_size` ranks share the tokens of blocks.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_stage: int = 0
    pp_size: int = 1
    pcp_rank: int = 0
    pcp_size: int = 1
    dcp_size: int = 1
    interleave: int = 1  # number of consecutive tokens on one of the ranks that share them

    @property
    def rank(self) -> int:
        """This rank's place among the ranks of its stage that readers meet."""
        return self.pcp_rank if self._is_shared_over_pcp else self.tp_rank

    @property
    def size(self) -> int:
        """Number of ranks of a stage that readers meet."""
        return self.pcp_size if self._is_shared_over_pcp else self.tp_size

    @property
    def is_replica(self) -> bool:
        """True if another rank, which readers meet, holds the same as this one."""
        return self.pcp_rank > 0 and not self._is_shared_over_pcp

    @property
    def _is_shared_over_pcp(self) -> bool:
        return self.pcp_size > 1 and self.dcp_size > 1

    def share(self, size: int) -> Range:
        """Return this rank's range if every rank holds `size` different entries."""
        return Range(self.tp_rank * size, (self.tp_rank + 1) * size, self.tp_size * size)


@dataclass(frozen=True, slots=True)
class Range:
    lo: int
    hi: int
    extent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    content: str  # kind of an entry's content; must be equal on both sides
    heads: Range | None  # range of the model's heads that this rank holds; None if every rank holds all
    tokens_per_entry: Fraction = Fraction(1)  # tokens per entry; below 1 if a token has several entries
    is_by_token: bool = True  # True if each entry can be moved alone; otherwise only whole kernel blocks move
    is_shared: bool = False  # True if ranks share the tokens of blocks

    def part(self, layer: str, tensor: Tensor, group: int, place: Place) -> TensorPart:
        each, order = self.tokens_per_entry, ["block", "head", TOKEN if self.is_by_token else "slot", "dim"]
        if not self.is_by_token and self.is_shared:
            # A whole kernel block is one entry, so that ranks can share tokens by whole kernel blocks.
            tensor, each = tensor.unsqueeze(2), each * tensor.shape[2]
            order[2:] = [TOKEN, "slot", "dim"]
        elif not self.is_by_token:
            each = Fraction(1)
        elif each < 1:
            # A layout needs one entry per token, so the entries of a token become a dim of their own.
            per_token = int(1 / each)
            tensor = tensor.unflatten(2, (-1, per_token))  # type: ignore[no-untyped-call]
            order.insert(3, "entry")
            each = Fraction(1)
        return _part(layer, self.content, tensor, order, group, "head", self.heads, int(each))


@dataclass(frozen=True, slots=True, kw_only=True)
class Opaque:
    """A layer of unknown structure, with `num_bytes` of content per page."""

    content: str
    num_bytes: int
    is_replicated: bool

    def part(self, layer: str, tensor: Tensor, group: int, place: Place) -> TensorPart:
        if tensor.shape[1:3] == (1, 1):
            tensor, dims = as_bytes(tensor[:, 0])[..., : self.num_bytes], ["byte"]
        else:
            tensor, dims = tensor.unsqueeze(1), ["row", "slot", "dim"]
        held = None if self.is_replicated else place.share(1)
        return _part(layer, self.content, tensor, ["block", "rank", *dims], group, "rank", held)


def kv_heads(num_local: int, num_shares: int | None, place: Place) -> Range:
    """Return the range of the model's KV heads that a rank with `num_local` heads holds.

    There are at most `num_shares` different shares, in the order of ranks; if there are fewer shares than ranks,
    neighbours hold the same one. An unknown number counts as one share per rank.
    """
    size = place.tp_size
    shares = size if not num_shares or size % num_shares else min(num_shares, size)
    at = place.tp_rank * shares // size * num_local
    return Range(at, at + num_local, shares * num_local)


def is_known(num_local: int, num_heads: int | None, place: Place) -> bool:
    """Return True if a rank of a model with `num_heads` KV heads in every layer holds `num_local` of them."""
    num_heads, size = num_heads or 0, place.tp_size
    return num_heads == num_local * size or (num_local == 1 and num_heads > 0 and size % num_heads == 0)


def _part(
    layer: str,
    name: str,
    tensor: Tensor,
    order: Sequence[str],
    group: int,
    axis: str,
    held: Range | None,
    each: int = 1,
) -> TensorPart:
    """Declare a part, with elements of a type that layouts do not know as bytes, and the type in the part's name."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEMSIZE:
        tensor, name = as_bytes(tensor), f"{name} {dtype}"
    cut: dict[str, Any] = {} if held is None else {"axis": axis, "held": (held.lo, held.hi), "extent": held.extent}
    return TensorPart(layer=layer, name=name, tensor=tensor, order=order, group=group, tokens_per_entry=each, **cut)


def states(
    layer: str,
    kind: str,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Dtype],
    is_dim_first: bool,
    num_groups: int | None,
    pages: Tensor,
    group: int,
    place: Place,
) -> list[TensorPart] | None:
    """Cut pages into the slices of a convolution's channels, and the recurrent state behind them.

    Return None if the kind is not known, or has states of other shapes.

    Args:
        num_groups: Number of the model's groups of Mamba-2's B and C. If it is None, every rank counts as having its
            own groups, so that a wrong guess meets only engines of as many ranks, as in `kv_heads`.
    """
    conv, state = shapes
    order = ("channel", "column") if is_dim_first else ("column", "channel")
    channels = conv[order.index("channel")] if len(conv) == 2 else 0
    rest = channels - prod(state[:2])  # channels besides those of the recurrent state
    dims: tuple[str, ...]
    match kind, len(state):
        case "mamba1", 2 if channels == state[0]:
            dims, sizes = ("channel", "state"), {"conv_x": channels}
        case "mamba2", 3 if rest >= 0 and rest % (2 * state[2]) == 0:
            dims = ("head", "head_dim", "state")
            sizes = {"conv_x": channels - rest, "conv_b": rest // 2, "conv_c": rest // 2}
        case "gdn_attn", 3 if rest > 0 and rest % 2 == 0:
            dims = ("head", "value_dim", "key_dim")
            sizes = {"conv_q": rest // 2, "conv_k": rest // 2, "conv_v": channels - rest}
        case _:
            return None
    end, made, first = prod(conv) * dtypes[0].itemsize, list[TensorPart](), 0
    whole = _array(pages[:, 0, 0, :end], dtypes[0], conv)
    for name, size in sizes.items():
        has_all = name in ("conv_b", "conv_c") and num_groups == 1 and size == state[2]  # the only group, on every rank
        held = Range(0, size, size) if has_all else place.share(size)
        if size:
            part = whole.narrow(1 + order.index("channel"), first, size)
            made.append(_part(layer, name, part, ("block", *order), group, "channel", held))
        first += size
    last = _array(pages[:, 0, 0, end : end + prod(state) * dtypes[1].itemsize], dtypes[1], state)
    return [*made, _part(layer, "state", last, ("block", *dims), group, dims[0], place.share(state[0]))]


def _array(page: Tensor, dtype: Dtype, shape: tuple[int, ...]) -> Tensor:
    return page.view(dtype).unflatten(1, shape)  # type: ignore[no-untyped-call, no-any-return]
