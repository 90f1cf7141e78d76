"""Tools for tests of programs that use asynckv: a manual clock and simulated planes, without pytest, NIXL or ZMQ."""

from __future__ import annotations

from asynckv.testing.clock import ManualClock
from asynckv.testing.fabric import SimControl, SimData, SimNetwork

__all__ = ["ManualClock", "SimControl", "SimData", "SimNetwork"]
