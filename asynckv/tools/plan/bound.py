"""The bound of a rank's rate over RDMA, on paper: Python, descriptors, copies or the wire limit it; and a head start.

The numbers of a request come from its caller, so that any way to read it can be compared. Different requests overlap.
So the slowest of these sets the rate, as if nothing else cost time: a running engine is slower.
"""

from __future__ import annotations

from typing import NamedTuple

PYTHON_REQUEST_S = 200e-6
"""CPU of a pull on the decode rank, without its posts: measured (docs/performance.md, "Over RDMA, on paper")."""
PYTHON_SOURCE_S = 80e-6  # CPU of every further remote rank of a pull, without its posts: measured there
PYTHON_POST_S = 50e-6  # CPU of a post to NIXL, its polls and its end: measured there
PYTHON_READER_S = 100e-6  # CPU of a prefill rank for each reader of a request: measured there
DESCRIPTOR_S = 0.5e-6  # of a descriptor over RDMA, in UCX and the device: *supposed*, as no such device was at hand
PARTS = ("wire", "descriptors", "python", "copy")


class Bound(NamedTuple):
    """Costs of one request on a rank, and the rate at which the slowest of them lets requests through."""

    bytes: int
    descriptors: int
    posts: int
    wire_s: float
    descriptors_s: float
    python_s: float
    copy_s: float  # of staged pieces to their places, or of packed copies, on one thread
    limit: str  # one of `PARTS`
    requests_per_s: float
    share_of_wire: float


def reader(
    num_bytes: int, descriptors: int, posts: int, sources: int, bytes_per_s: float, copy_s: float = 0.0
) -> Bound:
    """Return the bound of a decode rank that reads this from so many remote ranks for each request.

    `num_bytes` and `descriptors` are those read, after merging; they may be more than what the request needs.
    """
    python_s = PYTHON_REQUEST_S + (sources - 1) * PYTHON_SOURCE_S + posts * PYTHON_POST_S
    return _bound(num_bytes, descriptors, posts, python_s, copy_s, bytes_per_s)


def lender(num_bytes: int, readers: int, bytes_per_s: float, copy_s: float = 0.0) -> Bound:
    """Return the bound of a prefill rank that sends this to all of its readers; only packed copies cost it CPU."""
    return _bound(num_bytes, 0, 0, readers * PYTHON_READER_S, copy_s, bytes_per_s)


def _bound(num_bytes: int, descriptors: int, posts: int, python_s: float, copy_s: float, bytes_per_s: float) -> Bound:
    parts = num_bytes / bytes_per_s, descriptors * DESCRIPTOR_S, python_s, copy_s
    slowest = max(parts)
    limit = PARTS[parts.index(slowest)]
    return Bound(num_bytes, descriptors, posts, *parts, limit, 1 / slowest, parts[0] / slowest)


def head_start(
    num_tokens: int, cached: int, chunk_tokens: int, tokens_per_s: float, read_s: float, brought: float
) -> dict[str, float]:
    """Return what a head start saves at most, in seconds: each chunk but the last is read while others are computed.

    `read_s` is what the tokens behind the `cached` ones take. Pieces bring the share `brought` of it; windows and
    states come with the loan. `share` is that of the time to the first token (docs/performance.md, "A head start").
    """
    token_s = read_s * brought / (num_tokens - cached)
    ends = range(chunk_tokens, num_tokens, chunk_tokens)
    saved_s = sum(min(chunk_tokens / tokens_per_s, min(max(x - cached, 0), chunk_tokens) * token_s) for x in ends)
    compute_s = num_tokens / tokens_per_s
    times = {"compute_s": compute_s, "read_s": read_s, "saved_s": saved_s, "share": saved_s / (compute_s + read_s)}
    return {"chunk_tokens": chunk_tokens, "tokens_per_s": tokens_per_s, "chunks": len(ends) + 1, **times}
