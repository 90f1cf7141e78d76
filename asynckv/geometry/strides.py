"""The cut of an array that lies in two memories into byte ranges that are contiguous in both: one descriptor each.

An array is given by its dims, each as `(entries, byte stride in a, byte stride in b)`, in any order. A descriptor
begins as one element. A dim with a stride equal to the present length on both sides multiplies the length by its
entries. The other dims are stepped along. So the same memory order on both sides gives one descriptor for the array.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from asynckv.errors import LayoutError
from asynckv.geometry.bounds import Int64s

StridedDim = tuple[int, int, int]  # `(entries, byte stride in a, byte stride in b)`
MAX_RANGES = 65_536  # per part of one block, because the strides come from an untrusted peer


def count_descriptors(itemsize: int, dims: Sequence[StridedDim]) -> int:
    return math.prod(d[0] for d in fold(itemsize, dims)[1])


def fold(itemsize: int, dims: Sequence[StridedDim]) -> tuple[int, list[StridedDim]]:
    """Join the dims that are contiguous on both sides; return the length of a descriptor, and the other dims."""
    length, rest = itemsize, [d for d in dims if d[0] > 1]
    while folds := [d for d in rest if d[1] == length and d[2] == length]:
        length *= folds[0][0]
        rest.remove(folds[0])
    return length, rest


def strided_descriptors(itemsize: int, dims: Sequence[StridedDim]) -> tuple[Int64s, Int64s, int]:
    """Cut an array that lies in two memories into ranges that are contiguous in both.

    Returns byte offsets in a and in b (int64, ascending in a), and the length of every range.
    """
    length, rest = fold(itemsize, dims)
    if math.prod(d[0] for d in rest) > MAX_RANGES:
        raise LayoutError(
            f"the two memory orders share only pieces of {length} bytes, more than {MAX_RANGES} per block and "
            f"part; use the same order of dims on both sides"
        )
    a, b = step_along(sorted(rest, key=lambda d: -d[1]))
    order = np.argsort(a, kind="stable")
    return a[order], b[order], length


def joined(ranges: Int64s) -> Int64s:
    """Join rows of memory, offset and length where one touches the next."""
    memory, offset, length = ranges.T
    follows = (memory[1:] == memory[:-1]) & (offset[1:] == offset[:-1] + length[:-1])
    heads = np.flatnonzero(np.append(True, ~follows))
    return np.stack((memory[heads], offset[heads], np.add.reduceat(length, heads)), axis=1)


def step_along(dims: Sequence[StridedDim]) -> tuple[Int64s, Int64s]:
    """Return the byte offsets in a and in b of every step along some dims, the first dim outermost."""
    a, b = np.zeros(1, np.int64), np.zeros(1, np.int64)
    for size, in_a, in_b in dims:
        steps = np.arange(size, dtype=np.int64)
        a = (a[:, None] + steps * in_a).ravel()
        b = (b[:, None] + steps * in_b).ravel()
    return a, b
