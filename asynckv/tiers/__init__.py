"""Offload on an engine: the calls that a caller makes, the tiers of one rank, and the copies between them.

`asynckv/offload` decides which blocks are kept where, and `asynckv/edges` has their memory and files. This room joins
them to an engine, as its guest.
"""

from asynckv.tiers.offload import Offload

__all__ = ["Offload"]
