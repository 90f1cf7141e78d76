"""For testing what is built on asynckv: a manual clock, simulated planes, and the suite they both pass.

Nothing in here imports pytest, NIXL or ZMQ.
"""

from asynckv.testing.clock import ManualClock
from asynckv.testing.conformance import check_control_plane, check_data_plane
from asynckv.testing.planes import SimControl, SimData, SimNetwork

__all__ = ["ManualClock", "SimControl", "SimData", "SimNetwork", "check_control_plane", "check_data_plane"]
