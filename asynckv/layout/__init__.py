"""Layouts as data: what a rank's memory holds, for models that `register_tensors` does not describe.

`register_parts` takes tensors and slices of them, in groups. `register_memory` takes a `Layout`, which needs no torch.
"""

from __future__ import annotations

from asynckv.public import lazily

__all__, __getattr__ = lazily(__name__)
