"""Who answers for whom: the ranks of two tensor-parallel groups of any sizes.

Decode rank `d` of `T_D` answers for prefill rank `p` of `T_P` iff `[d/T_D, (d+1)/T_D)` overlaps
`[p/T_P, (p+1)/T_P)`. Every prefill rank is answered for, whatever the sizes, and both sides can say
by whom without talking: that is how a lease knows the exact set of readers it is owed, including
those that read nothing (MLA and GQA replicas, full prefix hits, aborted requests).

Pipeline stages multiply: every decode stage answers for every prefill stage. Only the handshakes tell
which of them share layers, and a lease has to know its readers before.
"""

from __future__ import annotations

__all__ = ["overlapping", "owed_readers", "remote_ranks"]


def overlapping(rank: int, size: int, other_size: int) -> range:
    """Return the ranks of a group of `other_size` whose share of the unit interval overlaps ours."""
    return range(rank * other_size // size, -(-(rank + 1) * other_size // size))


def remote_ranks(decode_rank: int, decode_size: int, prefill_size: int) -> range:
    """Return the prefill ranks that one decode rank must release, read or not."""
    return overlapping(decode_rank, decode_size, prefill_size)


def owed_readers(prefill_rank: int, prefill_size: int, decode_size: int) -> range:
    """Return the decode ranks whose release one prefill rank is owed."""
    return overlapping(prefill_rank, prefill_size, decode_size)
