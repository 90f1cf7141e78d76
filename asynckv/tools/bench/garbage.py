"""Python's cyclic garbage collector, as a serving engine sets it once it is warm (`docs/embedding.md`)."""

from __future__ import annotations

import gc

THRESHOLDS = (20_000, 20, 20)
"""New objects before the youngest are looked through, and how often before older ones are."""


def settle() -> None:
    """Look through what lives on once, and never again; look through what is new seldom.

    A collection looks through everything in flight. With thousands of requests that costs more than they do.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
