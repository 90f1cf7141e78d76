"""Figures of an engine for metrics and traces, readable from any thread.

A reading takes some microseconds per open request, on the loop, so take one every few seconds only.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from asynckv.account.inspect import is_hidden
from asynckv.arguments import number, shown
from asynckv.config import EngineConfig
from asynckv.core.types import rank_name
from asynckv.engine.driver import Driver
from asynckv.errors import LocalProtocolError
from asynckv.geometry.layout import Layout
from asynckv.observe.observer import Observer, Observers, Reading

T = TypeVar("T")

_CHANGING = threading.Lock()  # observers come and go on whatever thread, and the loop tells those that it finds


class Observation:
    """An engine, as its observers see it.

    Attributes:
        rank: Which rank of the engine this is, such as `tp3` or `pp1/tp3`.
    """

    def __init__(self, driver: Driver, config: EngineConfig, layout: Layout) -> None:
        self._driver, self._config = driver, config
        self.engine_id = config.engine_id
        self.rank = rank_name("", layout.tp_rank, layout.pp_stage).lstrip("/")

    def observe(self, observer: Observer) -> None:
        if not isinstance(observer, Observer):
            raise LocalProtocolError(f"observer is {shown(observer)}; give an asynckv.Observer")
        with _CHANGING:
            self._driver.observers = Observers(*self._driver.observers.everyone, observer)

    def unobserve(self, observer: Observer) -> None:
        with _CHANGING:
            left = [each for each in self._driver.observers.everyone if each is not observer]
            self._driver.observers = Observers(*left)

    def ask(self, question: Callable[[], T], timeout_s: float) -> T:
        """Ask something on the engine's loop, or raise `TimeoutError`: `observation.ask(engine.holds, 1.0)`."""
        return self._driver.home.ask(question, number("timeout_s", timeout_s, 0))

    def condition(self) -> tuple[str, str]:
        """Say what the engine is at (`docs/structure.md`), and which plane does not serve and why, if one does not."""
        driver = self._driver
        driver.home.asked(self.condition)
        data_down = f"the data plane does not serve: {driver.data_down}" if driver.data_down else ""
        return driver.life.state.value, driver.control_down or data_down

    def reading(self) -> Reading:
        driver, config = self._driver, self._config.pull
        driver.home.asked(self.reading)
        core, now = driver.core, driver.clock.now()
        decode, leases = core.decode, core.prefill.leases.values()
        pulls = [pull for pull in decode.pulls.values() if not is_hidden(pull)]
        held = [p for p in pulls if p.is_published and not p.is_returned and p.begun_at < math.inf]
        lease_ages = tuple([now - lease.lent_at for lease in leases])
        retired = (core.ledger.get(p.pull_id) for p in held if p.is_retired)
        return Reading(
            state=driver.life.state.value,
            incarnation=core.identity.incarnation,
            counters=driver.counters(),
            gauges=driver.inspect.gauges(),
            # States are texts; `.value` takes longer than all the rest of it, of tens of thousands.
            pulls=Counter([p.state for p in pulls]),
            leases=Counter([lease.state for lease in leases]),
            peers=Counter([peer.state for peer in decode.peers.by_place.values()]),
            waiting=decode.num_waiting,
            retrying=sum([request.attempts > 0 for request in decode.between.values()]),
            lease_ages_s=lease_ages,
            oldest_s={
                "lease": max(lease_ages, default=0.0),
                "unclaimed": max([now - x.lent_at for x in leases if not x.cohorts], default=0.0),
                "step": driver.inspect.step_s(now) or 0.0,
                "pull": max((now - p.called_at for p in pulls if not p.is_published), default=0.0),
                "quarantined": max((now - p.published_at for p in held), default=0.0),
            },
            waits_for_step=driver.inspect.waits_for_step(now),
            blocks_retired=sum(hold.num_blocks for hold in retired if hold is not None),
            limits={
                "bytes": config.total_bytes,
                "descriptors": config.total_descriptors,
                "requests": config.total_requests,
                "queued": config.max_queued,
                "parked": self._config.lease.max_parked,
            },
            descriptors_in_flight=decode.posting.in_flight.num_descriptors,
            data_down=driver.data_down,
            planes=driver.data.describe(),
        )
