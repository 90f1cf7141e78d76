"""Reads logs and asks engines, once or again and again, and joins what both say."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from datetime import time as time_of_day

from rich.console import Console
from rich.markup import escape

from asynckv.arguments import without_control
from asynckv.config import KeysConfig
from asynckv.errors import ConfigError
from asynckv.tools.diagnose import leaks_copies, leaks_live
from asynckv.tools.diagnose.ask import Answer, ask_all, targets
from asynckv.tools.diagnose.axis import Axis
from asynckv.tools.diagnose.findings import Seen
from asynckv.tools.diagnose.join import LoggedRequest, join
from asynckv.tools.diagnose.leaks import find_leaks
from asynckv.tools.diagnose.leaks_request import find_requests, names
from asynckv.tools.diagnose.presence import Presence
from asynckv.tools.diagnose.records import Logs, read_logs
from asynckv.tools.diagnose.timeline_model import Story, families, ground, stories

MOST_ASKED, MOST_SEARCHED = 256, 4096  # requests that an engine lists; the second if one is searched for
AGAIN_S = 0.5  # two engines answer at two moments; a fault between them counts if it is there again after this time


class Looking:
    """Look at logs, which are read once, and at engines, which are asked each time.

    Args:
        request: Name of the request in question, if any.
        since: Start of the time in question, as `moment` reads it.

    Raises:
        ConfigError: A file cannot be read.
    """

    def __init__(
        self, sources: Sequence[str], request: str | None, since: str | None, keys: KeysConfig | None, timeout_s: float
    ) -> None:
        self._request, self._since, self._keys, self._timeout_s = request, since, keys, timeout_s
        self._meant: set[LoggedRequest] = set()
        self.called: set[str] = set()  # what the request that is asked about is called, on either side
        self._sources = sources
        paths, _ = targets(sources)
        self._logs = self._read(paths) if paths else Logs()

    def look(self) -> Seen:
        """Ask the engines, and join their answers with the logs."""
        _, addresses = targets(self._sources)  # a process that starts makes a socket
        answers = self._asked(addresses, with_peers=True) if addresses else []
        seen = self._joined(answers)
        if not seen.late or not answers:
            return seen
        time.sleep(AGAIN_S)
        # The asker does not wait a second time for an engine that did not answer.
        silent = [x for x in answers if x.error]
        there = {x.address: x.peers_left_out for x in answers if not x.error}
        asked = [replace(x, peers_left_out=there[x.address]) for x in self._asked([*there], with_peers=False)]
        again = self._joined([*asked, *silent])
        late = {(x.cause, x.engine_id, x.request_id) for x in seen.late}
        return replace(again, late=[x for x in again.late if (x.cause, x.engine_id, x.request_id) in late])

    def stories(self, seen: Seen) -> list[Story]:
        """Return the request in question, or all that may be meant."""
        every = families(seen.service.requests)
        return stories(seen.axis, (x for x in every if not self._meant.isdisjoint(x)))

    def _read(self, paths: Sequence[str]) -> Logs:
        """Read logs, and show the progress on a terminal."""
        with Console(stderr=True).status("reading logs") as status:
            return read_logs(
                paths,
                lambda said: status.update(f"reading {escape(without_control(said))}"),
                request=self._request or "",
            )

    def _asked(self, addresses: Sequence[str], *, with_peers: bool) -> list[Answer]:
        most = MOST_ASKED if self._request is None else MOST_SEARCHED
        return asyncio.run(ask_all(addresses, self._keys, self._timeout_s, most=most, with_peers=with_peers))

    def _joined(self, answers: Sequence[Answer]) -> Seen:
        now = time.time()
        said = sorted(leaks_live.records_of(answers, now), key=lambda x: x.at)
        logs = replace(self._logs, records=[*self._logs.records, *said])
        if logs.nothing and not answers:
            raise ConfigError(logs.nothing)
        service = join(logs)
        leaks_live.settle(service, answers, self._logs.records)
        leaks_live.tell(service, answers, now)
        leaks_live.look_here(service)
        presence = Presence(axis := Axis(service))
        wanted = None
        if self._request is not None:
            wanted = find_requests(service, self._request, leaks_copies.called(service))
            self._meant, self.called = set(wanted), {self._request}.union(*map(names, wanted))
        last = max((axis.at(x, x.last_at) for x in service.processes.values() if x.num_records), default=now)
        begin = moment(self._since, last) if self._since is not None else -math.inf
        if begin > last:
            raise ConfigError(f"no event is later than --since {self._since}; the last is of {axis.moment(last)} UTC")

        def counts(rank: str, until: float) -> bool:
            """Return True if a request was late within the time in question, or has no time."""
            process = service.process_named(rank)
            return not (axis.at(process, until) if process is not None else until) < begin

        late = [x for x in find_leaks(presence, wanted) if counts(x.holders[0] if x.holders else "", x.until)]
        copies = leaks_copies.late_copies(service, None if wanted is None else self.called)
        copies = [x for x in copies if counts(x.rank, x.since + x.seconds)]
        failed = leaks_copies.failures(axis, self.called)
        return Seen(logs, presence, ground(presence), late, copies, answers, begin, failed)


def moment(text: str, last: float) -> float:
    """Return the time that the operator means, in seconds since 1970.

    Args:
        text: A time (UTC unless it says otherwise), one of the last day (`02:15`), or how long before the last event:
            `90s`, `10m`, `2h`.
        last: When that was.

    Raises:
        ConfigError: It is neither.
    """
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d)", text.strip()):
        return max(last - float(found[1]) * {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}[found[2]], 0.0)
    with suppress(ValueError, OverflowError, OSError):  # a time of day
        day = datetime.fromtimestamp(last, UTC)
        at = datetime.combine(day, time_of_day.fromisoformat(text.strip() if ":" in text else ""), UTC).timestamp()
        return at if at <= last else at - 86400
    try:
        when = datetime.fromisoformat(text.strip())
        return (when if when.tzinfo is not None else when.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since {text[:80]!r} is no time; write 2026-01-31T12:00 (UTC), 12:00 (of the last day), or 10m: so "
            "long before the last event"
        ) from None
