"""For testing what is built on asynckv: a manual clock, simulated planes, the suite they both pass, and the simulation.

Nothing in here imports pytest, NIXL or ZMQ.
"""

from asynckv.testing.clock import ManualClock
from asynckv.testing.conformance import check_control_plane, check_data_plane
from asynckv.testing.planes import SimControl, SimData, SimNetwork
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

__all__ = [
    "FAULTS",
    "Fault",
    "ManualClock",
    "Outcome",
    "Script",
    "SimControl",
    "SimData",
    "SimNetwork",
    "check_control_plane",
    "check_data_plane",
    "make_script",
    "minimise",
    "play",
    "simulate",
    "simulate_many",
]
