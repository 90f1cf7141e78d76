"""The settings of Python's garbage collector that a serving engine uses once it is warm (`docs/embedding.md`)."""

from __future__ import annotations

import gc


def settle() -> None:
    """Exclude long-lived objects from further collections, and collect new objects rarely.

    A collection visits everything in flight. With thousands of requests it would cost more than the requests.
    """
    gc.collect()
    gc.freeze()
    # New objects before the youngest generation is collected, then collections of it before an older one is.
    gc.set_threshold(20_000, 20, 20)
