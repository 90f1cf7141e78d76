"""The doors of a simulated rank: all that it has to do with the world outside of its process goes through them.

A rank is an engine with a configuration, a clock, two planes and a source of randomness, and it is known to others by
what comes out of these and by what its calls return. Whoever wants to see a simulated rank do wrong changes what passes
here, and so needs to know nothing of how the rank is made: a rank that sends every release once is one whose second
release is lost in its door. (Tests plant bugs that way, and see that the simulation finds them.)

Honest doors hand on what they are given, so that nothing is slower for them.
"""

from __future__ import annotations

from collections.abc import Callable

from asynckv.config import EngineConfig
from asynckv.engine import Engine
from asynckv.ports import Clock, ControlPlane, DataPlane
from tests.lab.world import Process


class Doors:
    """What one start of a rank's process is connected by; a subclass passes on something else.

    Args:
        process: The process that has begun.
    """

    def __init__(self, process: Process) -> None:
        self.process = process

    def config(self, config: EngineConfig) -> EngineConfig:
        """How the engine is set up."""
        return config

    def data(self, plane: DataPlane) -> DataPlane:
        """What the engine reads with."""
        return plane

    def control(self, plane: ControlPlane) -> ControlPlane:
        """What the engine talks with."""
        return plane

    def clock(self, clock: Clock) -> Clock:
        """What the engine reads the time from."""
        return clock

    def token_hex(self, token_hex: Callable[[int], str]) -> Callable[[int], str]:
        """Where the engine's names come from."""
        return token_hex

    def engine(self, engine: Engine) -> Engine:
        """What the rank's owner calls."""
        return engine
