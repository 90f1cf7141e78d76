"""Keys of stored blocks: the engine's own chain of hashes, cut to each group's blocks.

Hash `i` covers all tokens before `(i + 1) * hash_tokens`, so the hash at the end of a block names everything that the
block depends on. A block that ends between two hashes has no name, so `block_size` must be a multiple of `hash_tokens`.

The *namespace* is a digest of the model's fingerprint and of the group's content, without the geometry. So two ranks
that cut one model differently find each other's blocks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from asynckv.arguments import MAX_NAME, NO_SEQUENCE, integer, shown, text
from asynckv.errors import ConfigError, LocalProtocolError
from asynckv.geometry.bounds import MAX_TOKENS
from asynckv.geometry.layout import ONE_PER_REQUEST, TOKEN, Group, Layout, View

MAX_HASH_BYTES = 64  # bytes of one hash, in UTF-8 if it is text: SHA-512, or SHA-256 in hex
NAMESPACE_BYTES = 16  # length of the namespace, which precedes the hash in a key
MAX_HASHES = 1 << 20


class StoredGroup(Struct, frozen=True, kw_only=True):
    name: str
    block_size: int  # tokens per block; for states, tokens from one kept state to the next
    record_bytes: int  # bytes of one block in a tier, padding included
    is_state: bool = False
    window: int = 0  # sliding window, as in a layout's group; 0: all tokens
    namespace: str = ""  # meaning of its hashes, see `namespace`

    @property
    def needs_all(self) -> bool:
        """Return True if a request needs every block of its prefix, and not only the last ones."""
        return not (self.is_state or self.window)


def stored_groups(
    layout: Layout, record_bytes: Sequence[int], hash_tokens: int, model: str = ""
) -> tuple[StoredGroup, ...]:
    """Describe a layout's groups to tiers.

    Args:
        record_bytes: Per group, the bytes of one block in a tier.
        model: The model's fingerprint: weights, and everything else that changes the KV of a prompt.
    """
    integer("hash_tokens", hash_tokens, 1, MAX_TOKENS, ConfigError)
    for group in layout.groups:
        _check(group, layout.groups, hash_tokens)
    return tuple(
        StoredGroup(
            name=group.name,
            block_size=group.block_size,
            record_bytes=size,
            is_state=group.kind == "state",
            window=group.window,
            namespace=namespace(layout, i, hash_tokens, model),
        )
        for i, (group, size) in enumerate(zip(layout.groups, record_bytes, strict=True))
    )


def _check(group: Group, groups: Sequence[Group], hash_tokens: int) -> None:
    if group.kind == "state" and group.block_size >= ONE_PER_REQUEST:
        raise ConfigError(
            f"group {shown(group.name)} keeps one state per request, which no hash of a prefix names, so it cannot be "
            f"stored; enable prefix caching in the engine, so that states are kept at the ends of blocks, and declare "
            f"the tokens between them as its block_size"
        )
    if group.block_size % hash_tokens == 0:
        return
    sizes = [g.block_size for g in groups if g.kind == "tokens" or g.block_size < ONE_PER_REQUEST]
    common = math.gcd(*sizes)
    works = [n for n in range(min(common, 1 << 16), 0, -1) if common % n == 0][:4]
    below = group.block_size // hash_tokens * hash_tokens
    near = " or ".join(str(n) for n in (below, below + hash_tokens) if n)
    raise ConfigError(
        f"group {shown(group.name)} has blocks of {group.block_size} tokens, but hashes cover {hash_tokens}, so a "
        f"block would end where no hash does; use hash_tokens that divides every group's block_size "
        f"({', '.join(map(str, works))}), or a block_size of {near}; in hybrid models prefix caching aligns the "
        f"groups' block sizes, so enable it"
    )


def namespace(layout: Layout, group: int, hash_tokens: int, model: str = "") -> str:
    """Return a digest of the meaning of a group's hashes, without the rank's share, block size and memory order."""
    text("model", model, MAX_NAME, error=ConfigError)
    told = layout.groups[group]
    views = sorted(_described(view) for view in layout.views if view.group == group)
    said = (1, layout.model, model, hash_tokens, told.name, told.kind, told.window, views)
    return hashlib.sha256(msgspec.msgpack.encode(said)).hexdigest()[:32]


def _described(view: View) -> tuple[object, ...]:
    return view.layer, sorted(
        (
            part.name,
            part.dtype,
            part.itemsize,
            part.axis,
            part.tokens_per_entry,
            sorted(
                (dim.name, part.extent if dim.name == part.axis else dim.size)
                for dim in part.dims
                if dim.name != TOKEN or dim.name == part.axis
            ),
        )
        for part in view.parts
    )


def as_hashes(hashes: Sequence[str | bytes]) -> list[bytes]:
    """Return a prompt's hashes as bytes; raise `LocalProtocolError` for other types, empty or too long ones."""
    if isinstance(hashes, NO_SEQUENCE) or not isinstance(hashes, Sequence):
        raise LocalProtocolError(f"hashes is {shown(hashes)}; give one text or bytes per hash_tokens tokens")
    if len(hashes) > MAX_HASHES:
        raise LocalProtocolError(f"{len(hashes)} hashes are given; at most {MAX_HASHES} are taken")
    try:
        given: Sequence[Any] = hashes
        is_bytes = set(map(type, given)) <= {bytes}
        found: list[bytes] = list(given) if is_bytes else [h if type(h) is bytes else h.encode() for h in given]
        sizes = set(map(len, found))
    except (AttributeError, TypeError, UnicodeEncodeError):
        raise LocalProtocolError(f"hashes has something that is neither text nor bytes: {shown(hashes)}") from None
    if sizes and not (min(sizes) >= 1 and max(sizes) <= MAX_HASH_BYTES):
        raise LocalProtocolError(f"a hash has {max(sizes)} bytes; each must have from 1 to {MAX_HASH_BYTES}")
    return found


def block_hashes(hashes: list[bytes], block_size: int, hash_tokens: int) -> list[bytes]:
    every = block_size // hash_tokens
    return hashes if every == 1 else hashes[every - 1 :: every]


def short(key: bytes) -> str:
    """Return the first bytes of a key's hash in hex, for people."""
    return (key[NAMESPACE_BYTES:] or key)[:8].hex()


def needed(group: StoredGroup, first_token: int, tokens: int) -> range:
    """Return the blocks of a group that a request needs to continue after `tokens`, with those before `first_token`."""
    end = tokens // group.block_size
    if first_token >= tokens:
        return range(0)
    if group.is_state:
        return range(max(0, end - 1), end)
    first = first_token
    if group.window:
        first = max(first, tokens - (group.window - 1))
    return range(min(end, first // group.block_size), end)
