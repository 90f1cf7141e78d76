"""What it means how the other side answered. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from asynckv.diagnose.doctor.catalogue import Finding
from asynckv.diagnose.doctor.facts import Facts

__all__ = ["PEER_CHECKS"]

PEER_CHECKS: tuple[Callable[[Facts], Iterator[Finding]], ...] = ()
