"""Move KV cache between prefill and decode workers: NIXL carries the bytes, ZMQ the decisions.

Public names load on first use, so that importing the package costs next to nothing and brings in
neither torch nor NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asynckv.config import (
        EngineConfig,
        InspectConfig,
        KeysConfig,
        LeaseConfig,
        LimitsConfig,
        LogConfig,
        NixlConfig,
        OffloadConfig,
        PullConfig,
    )
    from asynckv.core.inspect import HeldBlocks, RankStatus, RequestStatus
    from asynckv.core.types import Endpoint, Params
    from asynckv.edges.sharing import shared_memory
    from asynckv.edges.torch import TensorPart, register_parts, register_tensors, shared_tensor, written
    from asynckv.embed import (
        Announce,
        Cancel,
        Discharge,
        EngineDesk,
        EngineThread,
        Failed,
        Finished,
        Lend,
        Load,
        Lookup,
        Order,
        Pull,
        Reclaim,
        Refused,
        Store,
        Withdraw,
    )
    from asynckv.engine import Engine, LentRequest, Offload
    from asynckv.errors import (
        AsyncKVError,
        BackendError,
        BlocksRetired,
        ConfigError,
        EngineClosed,
        GeometryRefused,
        LayoutError,
        LeaseLost,
        LeaseRefused,
        LocalProtocolError,
        NotLentYet,
        Overloaded,
        PeerLost,
        PeerUnreachable,
        PlanRefused,
        ProtocolError,
        PullCancelled,
        PullError,
        PullTimeout,
        ReadFailed,
        RemoteProtocolError,
        RemoteTooShort,
        WrongThread,
    )
    from asynckv.geometry.check import Registration, register_memory
    from asynckv.geometry.layout import (
        ONE_PER_REQUEST,
        Dim,
        Group,
        Layout,
        Memory,
        Part,
        View,
        attention_view,
        dense_part,
        shard,
    )
    from asynckv.hashes import token_hashes
    from asynckv.observe.endpoint import MetricsEndpoint
    from asynckv.observe.log import configure as configure_logging
    from asynckv.observe.metrics import Metrics
    from asynckv.observe.observer import Observer, Reading
    from asynckv.observe.tracing import Tracing, trace_context
    from asynckv.offload.found import Found
    from asynckv.results import Evicted, LeaseEnd, Loaded, PullResult, Statistics, Stored
    from asynckv.scheduler import PrefillGroup

_HOMES = {
    "asynckv.config": (
        "EngineConfig InspectConfig KeysConfig LeaseConfig LimitsConfig LogConfig NixlConfig OffloadConfig PullConfig"
    ),
    "asynckv.hashes": "token_hashes",
    "asynckv.scheduler": "PrefillGroup",
    "asynckv.core.inspect": "HeldBlocks RankStatus RequestStatus",
    "asynckv.geometry.layout": "ONE_PER_REQUEST Dim Group Layout Memory Part View attention_view dense_part shard",
    "asynckv.core.types": "Endpoint Params",
    "asynckv.edges.sharing": "shared_memory",
    "asynckv.edges.torch": "TensorPart register_parts register_tensors shared_tensor written",
    "asynckv.embed": (
        "Announce Cancel Discharge EngineDesk EngineThread Failed Finished Lend Load Lookup Order Pull "
        "Reclaim Refused Store Withdraw"
    ),
    "asynckv.engine": "Engine LentRequest Offload",
    "asynckv.errors": (
        "AsyncKVError BackendError BlocksRetired ConfigError EngineClosed GeometryRefused LayoutError LeaseLost "
        "LeaseRefused LocalProtocolError NotLentYet Overloaded PeerLost PeerUnreachable PlanRefused ProtocolError "
        "PullCancelled PullError PullTimeout ReadFailed RemoteProtocolError RemoteTooShort WrongThread"
    ),
    "asynckv.observe.endpoint": "MetricsEndpoint",
    "asynckv.observe.log": "configure_logging",
    "asynckv.observe.metrics": "Metrics",
    "asynckv.observe.observer": "Observer Reading",
    "asynckv.observe.tracing": "Tracing trace_context",
    "asynckv.geometry.check": "Registration register_memory",
    "asynckv.offload.found": "Found",
    "asynckv.results": "Evicted LeaseEnd Loaded PullResult Statistics Stored",
}
_RENAMED = {"configure_logging": "configure"}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = [
    "ONE_PER_REQUEST",
    "Announce",
    "AsyncKVError",
    "BackendError",
    "BlocksRetired",
    "Cancel",
    "ConfigError",
    "Dim",
    "Discharge",
    "Endpoint",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineDesk",
    "EngineThread",
    "Evicted",
    "Failed",
    "Finished",
    "Found",
    "GeometryRefused",
    "Group",
    "HeldBlocks",
    "InspectConfig",
    "KeysConfig",
    "Layout",
    "LayoutError",
    "LeaseConfig",
    "LeaseEnd",
    "LeaseLost",
    "LeaseRefused",
    "Lend",
    "LentRequest",
    "LimitsConfig",
    "Load",
    "Loaded",
    "LocalProtocolError",
    "LogConfig",
    "Lookup",
    "Memory",
    "Metrics",
    "MetricsEndpoint",
    "NixlConfig",
    "NotLentYet",
    "Observer",
    "Offload",
    "OffloadConfig",
    "Order",
    "Overloaded",
    "Params",
    "Part",
    "PeerLost",
    "PeerUnreachable",
    "PlanRefused",
    "PrefillGroup",
    "ProtocolError",
    "Pull",
    "PullCancelled",
    "PullConfig",
    "PullError",
    "PullResult",
    "PullTimeout",
    "RankStatus",
    "ReadFailed",
    "Reading",
    "Reclaim",
    "Refused",
    "Registration",
    "RemoteProtocolError",
    "RemoteTooShort",
    "RequestStatus",
    "Statistics",
    "Store",
    "Stored",
    "TensorPart",
    "Tracing",
    "View",
    "Withdraw",
    "WrongThread",
    "attention_view",
    "configure_logging",
    "dense_part",
    "register_memory",
    "register_parts",
    "register_tensors",
    "shard",
    "shared_memory",
    "shared_tensor",
    "token_hashes",
    "trace_context",
    "written",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from asynckv.version import VERSION

        return VERSION
    if name not in _HOME:
        raise AttributeError(f"module 'asynckv' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
