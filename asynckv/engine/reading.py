"""An engine at one moment, in plain values: what metrics show.

It is asked for on the loop and takes some microseconds per request that is open, so once in some seconds.
"""

from __future__ import annotations

import math
from collections import Counter

from asynckv.config import EngineConfig
from asynckv.engine.driver import Driver
from asynckv.observe.observer import Reading

__all__ = ["read"]


def read(driver: Driver, config: EngineConfig, incarnation: str, retrying: int) -> Reading:
    """Take a reading of a started engine."""
    core, now, pull = driver.core, driver.clock.now(), config.pull
    decode, leases = core.decode, core.prefill.leases.values()
    pulls = decode.pulls.values()
    held = [p for p in pulls if p.is_published and not p.is_returned and p.begun_at < math.inf]
    lease_ages = tuple(now - lease.lent_at for lease in leases)
    return Reading(
        state=driver.life.state.value,
        incarnation=incarnation,
        counters=driver.counters(),
        gauges=core.inspect.gauges(),
        pulls=Counter(p.state.value for p in pulls),
        leases=Counter(lease.state.value for lease in leases),
        peers=Counter(peer.state.value for peer in decode.peers.by_place.values()),
        waiting=decode.num_waiting,
        retrying=retrying,
        lease_ages_s=lease_ages,
        oldest_s={
            "lease": max(lease_ages, default=0.0),
            "pull": max((now - p.called_at for p in pulls if not p.is_published), default=0.0),
            "quarantined": max((now - p.published_at for p in held), default=0.0),
        },
        blocks_retired=sum(
            hold.num_blocks for p in held if p.is_retired and (hold := core.ledger.get(p.pull_id)) is not None
        ),
        limits={
            "bytes": pull.total_bytes,
            "descriptors": pull.total_descriptors,
            "requests": pull.total_requests,
            "queued": pull.max_queued,
            "parked": config.lease.max_parked,
        },
        descriptors_in_flight=decode.in_flight.num_descriptors,
        data_down=driver.data_down,
        planes=driver.data.describe(),
    )
