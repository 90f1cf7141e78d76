"""Values that cross between the scheduler's process and the workers': a step's orders, reports, and addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from asynckv.embed.orders import Failed, Offer, Order
from asynckv.integrations.vllm.compat import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)
from asynckv.told import PromptsCounted


@dataclass
class StepOrders(KVConnectorMetadata):
    """Orders of one step for every worker. `failing` are loads that fail because the load that they waited for did.
    `prompts` are counts for the first worker's engine, if they have changed.
    """

    orders: Sequence[Order] = field(default_factory=tuple)
    failing: Sequence[str] = ()
    prompts: PromptsCounted | None = None


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):
    """A worker's address, which the scheduler's half gives to readers (`PrefillRanks`)."""

    endpoint: dict[str, Any]
    memory_epoch: int


@dataclass
class FollowReports(KVConnectorWorkerMetadata):
    """Offers to a worker that follows tickets, the follows that ended without, and tickets whose followers wait for a
    piece. vLLM joins those of all workers.
    """

    offered: list[Offer]
    not_offered: list[Failed]
    followed: list[str] = field(default_factory=list)

    def aggregate(self, other: Any) -> FollowReports:
        joined = (getattr(self, name) + getattr(other, name) for name in ("offered", "not_offered", "followed"))
        return FollowReports(*joined)
