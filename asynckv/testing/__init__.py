"""For testing what is built on asynckv: a manual clock, simulated planes, and the suite that planes pass.

Nothing in here imports pytest, NIXL or ZMQ.
"""

from __future__ import annotations

from asynckv.testing.clock import ManualClock
from asynckv.testing.conformance import check_control_plane, check_data_plane
from asynckv.testing.fabric import SimControl, SimData, SimNetwork

__all__ = [
    "ManualClock",
    "SimControl",
    "SimData",
    "SimNetwork",
    "check_control_plane",
    "check_data_plane",
]
