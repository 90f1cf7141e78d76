"""The doors of a simulated rank: all that it has to do with the world outside of its process goes through them.

A rank is an engine with a configuration, a clock, two planes and a source of randomness, and it is known to others by
what comes out of these and by what its calls return. A test that wants a simulated rank to do wrong changes what passes
here, and need not know how the rank is made: for a rank that sends every release only once, the second release is lost
in its door. (Tests plant bugs that way, and see that the simulation finds them.)

Honest doors hand on what they are given, so that nothing is slower for them.
"""

from __future__ import annotations

from collections.abc import Callable

from asynckv.config import EngineConfig
from asynckv.engine import Engine
from asynckv.ports import Clock, ControlPlane, DataPlane
from tests.lab.world import Process


class Doors:
    """Connections of one start of a rank's process; a subclass passes on something else.

    Args:
        process: The process that has begun.
    """

    def __init__(self, process: Process) -> None:
        self.process = process

    def config(self, config: EngineConfig) -> EngineConfig:
        return config

    def data(self, plane: DataPlane) -> DataPlane:
        return plane

    def control(self, plane: ControlPlane) -> ControlPlane:
        return plane

    def clock(self, clock: Clock) -> Clock:
        return clock

    def token_hex(self, token_hex: Callable[[int], str]) -> Callable[[int], str]:
        """Where the engine's names come from."""
        return token_hex

    def engine(self, engine: Engine) -> Engine:
        return engine
