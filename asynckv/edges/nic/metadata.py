"""A check of a remote agent's NIXL metadata before NIXL loads it.

NIXL hands UCX's parts to UCX without their length. UCX ends the process on a worker address of an unknown version, and
on a memory key that names more memory domains than there are (62 of 275 mutations). NIXL ends it on an unknown kind of
memory. All three are refused here. UCX also ends on the contents of some worker addresses (8 of 12,000 mutations), so
the metadata of a peer that is not trusted is loaded by a separate process first (`survivor/taster.py`).
"""

from __future__ import annotations

from asynckv.errors import BackendError

MAGIC, LENGTH = b"nixlSerDes|", 8
VERSIONS = {0, 1}  # of UCX's worker addresses: the low half of their first byte
MEMORY_KINDS = {0, 1}  # host and device; NIXL looks others up in a table without a bounds check
DESCRIPTOR, DOMAINS, KEY_HEADER = 24, 32, 9  # bytes before the key; most memory domains; bytes before them


class _Reader:
    """Take fields off a serialised form: a tag, a length, the bytes, a bar."""

    def __init__(self, blob: bytes) -> None:
        self.blob, self.at = blob, len(MAGIC)
        if not blob.startswith(MAGIC):
            raise ValueError("it does not begin with NIXL's mark")

    def take(self, tag: bytes, size: int | None = None) -> bytes:
        begin = self.at + len(tag) + LENGTH
        end = begin + int.from_bytes(self.blob[begin - LENGTH : begin], "little")
        if self.blob[self.at : begin - LENGTH] != tag or self.blob[end : end + 1] != b"|":
            raise ValueError(f"field {tag.decode()!r} is not at byte {self.at}, where it has to be")
        if size is not None and end - begin != size:
            raise ValueError(f"field {tag.decode()!r} has {end - begin} bytes, not {size}")
        self.at = end + 1
        return self.blob[begin:end]

    def count(self, tag: bytes, size: int = LENGTH) -> int:
        return int.from_bytes(self.take(tag, size), "little")


def _check(metadata: bytes) -> str:
    """Return the agent's name; raise `ValueError` if a part is not as NIXL writes it, or would end the process."""
    reader = _Reader(metadata)
    name = reader.take(b"Agent").decode()
    for _ in range(reader.count(b"Conns")):
        is_ucx, address = reader.take(b"t") == b"UCX", reader.take(b"c")
        if is_ucx and (not address or address[0] & 15 not in VERSIONS):
            raise ValueError("its worker address is of a version that UCX does not know")
    if reader.take(b"") != b"MemSection":
        raise ValueError("it has no memory section")
    for _ in range(reader.count(b"nixlSecElms")):
        is_ucx, kind = reader.take(b"bknd") == b"UCX", reader.take(b"nixlDList")
        if kind != b"nixlSDList":
            raise ValueError("its memory is not described in NIXL's form")
        if reader.count(b"t", 4) not in MEMORY_KINDS:
            raise ValueError("its memory is of a kind that NIXL does not know")
        for _ in range(reader.count(b"n")):
            descriptor = reader.take(b"")
            if len(descriptor) < DESCRIPTOR or (is_ucx and not _is_key(descriptor[DESCRIPTOR:])):
                raise ValueError("one of its memory keys is incomplete")
    if reader.at != len(metadata):
        raise ValueError(f"{len(metadata) - reader.at} bytes follow its end")
    return name


def _is_key(key: bytes) -> bool:
    """Return True if a memory key has all parts that its map of memory domains names."""
    domains, at = int.from_bytes(key[:LENGTH], "little"), KEY_HEADER
    for _ in range(domains.bit_count()):
        at += 1 + (key[at] if at < len(key) else len(key))
    return domains < 1 << DOMAINS and at <= len(key)


def is_known(metadata: bytes) -> bool:
    """Return True if this NIXL writes metadata in the form that is known here; pass metadata of an own agent."""
    try:
        return bool(_check(metadata))
    except ValueError:
        return False


def renamed(metadata: bytes, name: str, alias: str) -> bytes:
    """Return an agent's metadata under another name, because a load that fails leaves the name behind inside NIXL."""
    try:
        found = _check(metadata)
    except ValueError as exc:
        raise BackendError(f"NIXL refuses the metadata of {name}, or would end the process: {exc}") from None
    if found != name:
        raise BackendError(f"NIXL metadata is of agent {found!r}, but {name!r} was announced")
    head, own = MAGIC + b"Agent", alias.encode()
    rest = metadata[len(head) + LENGTH + len(name.encode()) :]
    return head + len(own).to_bytes(LENGTH, "little") + own + rest
