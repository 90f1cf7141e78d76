"""Move KV cache between prefill and decode workers: NIXL carries the bytes, ZMQ the decisions.

Public names load on first use, so that importing the package costs next to nothing and brings in neither torch nor
NIXL. Type checkers read the first list below, Python the second; a test compares them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckv.config import EngineConfig as EngineConfig
    from asynckv.config import InspectConfig as InspectConfig
    from asynckv.config import KeysConfig as KeysConfig
    from asynckv.config import LeaseConfig as LeaseConfig
    from asynckv.config import LimitsConfig as LimitsConfig
    from asynckv.config import LogConfig as LogConfig
    from asynckv.config import NixlConfig as NixlConfig
    from asynckv.config import PullConfig as PullConfig
    from asynckv.core.inspect import HeldBlocks as HeldBlocks
    from asynckv.core.inspect import RankStatus as RankStatus
    from asynckv.core.inspect import RequestStatus as RequestStatus
    from asynckv.core.types import Endpoint as Endpoint
    from asynckv.core.types import KVTransferParams as KVTransferParams
    from asynckv.edges.sharing import shared_memory as shared_memory
    from asynckv.edges.torch import register_tensors as register_tensors
    from asynckv.edges.torch import shared_tensor as shared_tensor
    from asynckv.edges.torch import synchronize as synchronize
    from asynckv.embed import Announce as Announce
    from asynckv.embed import Cancel as Cancel
    from asynckv.embed import DecodeLedger as DecodeLedger
    from asynckv.embed import EngineDesk as EngineDesk
    from asynckv.embed import EngineThread as EngineThread
    from asynckv.embed import Failed as Failed
    from asynckv.embed import Finished as Finished
    from asynckv.embed import Lend as Lend
    from asynckv.embed import Order as Order
    from asynckv.embed import PrefillLedger as PrefillLedger
    from asynckv.embed import Pull as Pull
    from asynckv.embed import Reclaim as Reclaim
    from asynckv.embed import Refused as Refused
    from asynckv.embed import Withdraw as Withdraw
    from asynckv.engine import Engine as Engine
    from asynckv.engine import LentRequest as LentRequest
    from asynckv.errors import AsyncKVError as AsyncKVError
    from asynckv.errors import BackendError as BackendError
    from asynckv.errors import BlocksRetired as BlocksRetired
    from asynckv.errors import ConfigError as ConfigError
    from asynckv.errors import EngineClosed as EngineClosed
    from asynckv.errors import GeometryRefused as GeometryRefused
    from asynckv.errors import LayoutError as LayoutError
    from asynckv.errors import LeaseLost as LeaseLost
    from asynckv.errors import LeaseRefused as LeaseRefused
    from asynckv.errors import LocalProtocolError as LocalProtocolError
    from asynckv.errors import NotLentYet as NotLentYet
    from asynckv.errors import Overloaded as Overloaded
    from asynckv.errors import PeerLost as PeerLost
    from asynckv.errors import PeerUnreachable as PeerUnreachable
    from asynckv.errors import PlanRefused as PlanRefused
    from asynckv.errors import ProtocolError as ProtocolError
    from asynckv.errors import PullCancelled as PullCancelled
    from asynckv.errors import PullError as PullError
    from asynckv.errors import PullTimeout as PullTimeout
    from asynckv.errors import ReadFailed as ReadFailed
    from asynckv.errors import RemoteProtocolError as RemoteProtocolError
    from asynckv.errors import RemoteTooShort as RemoteTooShort
    from asynckv.errors import WrongThread as WrongThread
    from asynckv.geometry.check import Registration as Registration
    from asynckv.geometry.layout import shard as shard
    from asynckv.hashes import token_hashes as token_hashes
    from asynckv.observe.endpoint import MetricsEndpoint as MetricsEndpoint
    from asynckv.observe.metrics import Metrics as Metrics
    from asynckv.observe.observer import Observer as Observer
    from asynckv.observe.observer import Reading as Reading
    from asynckv.observe.setup import configure_logging as configure_logging
    from asynckv.observe.tracing import Tracing as Tracing
    from asynckv.observe.tracing import trace_context as trace_context
    from asynckv.results import LeaseEnd as LeaseEnd
    from asynckv.results import PullResult as PullResult
    from asynckv.results import Statistics as Statistics
    from asynckv.scheduler import PrefillRanks as PrefillRanks

_HOMES = {
    "asynckv.config": (
        "EngineConfig InspectConfig KeysConfig LeaseConfig LimitsConfig LogConfig NixlConfig PullConfig"
    ),
    "asynckv.hashes": "token_hashes",
    "asynckv.scheduler": "PrefillRanks",
    "asynckv.core.inspect": "HeldBlocks RankStatus RequestStatus",
    "asynckv.geometry.layout": "shard",
    "asynckv.core.types": "Endpoint KVTransferParams",
    "asynckv.edges.sharing": "shared_memory",
    "asynckv.edges.torch": "register_tensors shared_tensor synchronize",
    "asynckv.embed": (
        "Announce Cancel DecodeLedger EngineDesk EngineThread Failed Finished Lend Order "
        "PrefillLedger Pull Reclaim Refused Withdraw"
    ),
    "asynckv.engine": "Engine LentRequest",
    "asynckv.errors": (
        "AsyncKVError BackendError BlocksRetired ConfigError EngineClosed GeometryRefused LayoutError LeaseLost "
        "LeaseRefused LocalProtocolError NotLentYet Overloaded PeerLost PeerUnreachable PlanRefused ProtocolError "
        "PullCancelled PullError PullTimeout ReadFailed RemoteProtocolError RemoteTooShort WrongThread"
    ),
    "asynckv.observe.endpoint": "MetricsEndpoint",
    "asynckv.observe.setup": "configure_logging",
    "asynckv.observe.metrics": "Metrics",
    "asynckv.observe.observer": "Observer Reading",
    "asynckv.observe.tracing": "Tracing trace_context",
    "asynckv.geometry.check": "Registration",
    "asynckv.results": "LeaseEnd PullResult Statistics",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_NEEDS_EXTRA = {"asynckv.observe.endpoint", "asynckv.observe.metrics"}

__all__ = sorted(name for name, module in _HOME.items() if module not in _NEEDS_EXTRA)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from asynckv.version import VERSION

        return VERSION
    if name not in _HOME:
        raise AttributeError(f"module 'asynckv' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ImportError as exc:
        if _HOME[name] not in _NEEDS_EXTRA:
            raise
        value = _without_extra(name, str(exc))
    globals()[name] = value
    return value


def _without_extra(name: str, remedy: str) -> type:
    """Make a class that can be imported and listed; making an object of it says which extra is missing."""

    def __init__(self: object, *args: object, **options: object) -> None:
        raise ImportError(remedy)

    return type(name, (), {"__init__": __init__, "__doc__": remedy})


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
