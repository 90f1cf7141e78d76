"""Layouts as data: what a rank's memory holds, for models that `register_tensors` does not describe.

`register_parts` takes tensors and slices of them, in groups. `register_memory` takes a `Layout`, which needs no torch.
"""

from __future__ import annotations

from asynckv.edges.torch import TensorPart, register_parts
from asynckv.geometry.check import register_memory
from asynckv.geometry.layout import (
    ONE_PER_REQUEST,
    Dim,
    Group,
    Layout,
    Memory,
    Part,
    TokenShard,
    View,
    attention_view,
    dense_part,
)

__all__ = [
    "ONE_PER_REQUEST",
    "Dim",
    "Group",
    "Layout",
    "Memory",
    "Part",
    "TensorPart",
    "TokenShard",
    "View",
    "attention_view",
    "dense_part",
    "register_memory",
    "register_parts",
]
