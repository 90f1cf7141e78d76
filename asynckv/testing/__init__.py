"""For testing what is built on asynckv: a manual clock, simulated planes, the suite they both pass, the simulation, and
real processes with memory that shows what went wrong (`asynckv.testing.fleet`).

Nothing in here imports pytest, NIXL or ZMQ. Names load on first use: a process of a fleet may run under a Python that
has nothing of what the others need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckv.testing.clock import ManualClock
    from asynckv.testing.conformance import check_control_plane, check_data_plane
    from asynckv.testing.fabric import SimControl, SimData, SimNetwork
    from asynckv.testing.simulation import (
        FAULTS,
        Fault,
        Outcome,
        Script,
        make_script,
        minimise,
        play,
        simulate,
        simulate_many,
    )
    from asynckv.testing.tiers import SimCopies, SimDisk, SimRecords

__all__ = [
    "FAULTS",
    "Fault",
    "ManualClock",
    "Outcome",
    "Script",
    "SimControl",
    "SimCopies",
    "SimData",
    "SimDisk",
    "SimNetwork",
    "SimRecords",
    "check_control_plane",
    "check_data_plane",
    "make_script",
    "minimise",
    "play",
    "simulate",
    "simulate_many",
]

HOME = {
    "ManualClock": "clock",
    "SimControl": "fabric",
    "SimCopies": "tiers",
    "SimData": "fabric",
    "SimDisk": "tiers",
    "SimNetwork": "fabric",
    "SimRecords": "tiers",
    "check_control_plane": "conformance",
    "check_data_plane": "conformance",
}
"""Where each is defined, unless in `simulation`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{HOME.get(name, 'simulation')}"), name)
