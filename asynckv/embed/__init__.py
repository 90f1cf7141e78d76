"""Embed asynckv in an engine's worker: orders and their results (`orders`), and two ways to carry them out.

- `thread`: an engine on its own thread and event loop, usable from any thread. Most engines want this.
- `desk`: an engine on an event loop that already runs.

The scheduler's half is `ledgers`, which records the blocks of each request and the reports of every rank.
"""

from __future__ import annotations

from asynckv.public import lazily

__all__, __getattr__ = lazily(__name__)
