"""Logs of a small service, written by hand: a prefill rank, and two decode ranks of a host whose clock is ahead."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

BEGIN = 1_800_000_000.0
AHEAD = 5.0
"""The decode host's clock."""
PREFILL, DECODE = "a" * 32, ("b" * 32, "c" * 32)
P, D = f"prefill/tp0@{PREFILL[:8]}", tuple(f"decode/tp{i}@{x[:8]}" for i, x in enumerate(DECODE))


class Written:
    """Lines of both hosts, by true time."""

    def __init__(self) -> None:
        self.lines: list[tuple[float, str]] = []

    def line(self, event: str, at: float, rank: str, level: str = "info", **fields: Any) -> None:
        """Write one; `at` is true, and the line has the time of its host."""
        engine = rank.split("/")[0]
        shown = datetime.fromtimestamp(BEGIN + at + (AHEAD if engine == "decode" else 0.0), UTC)
        start = next(x for x in (PREFILL, *DECODE) if x.startswith(rank[-8:]))
        text = json.dumps(
            {
                "engine_id": engine,
                "tp_rank": int(rank.split("tp")[1].split("@")[0]),
                "incarnation": start,
                "rank": rank,
                **fields,
                "event": event,
                "level": level,
                "timestamp": shown.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            }
        )
        self.lines.append((at, text))

    def begin(self) -> None:
        """Start everybody, and let them meet."""
        self.line("engine_started", 0.0, P, host="prefill-host", lease_s=30.0)
        for i, rank in enumerate(D):
            at = 0.1 + 0.01 * i
            self.line("engine_started", 0.05, rank, host="decode-host")
            self.line("peer_changed", at, rank, peer=P, before="new", state="connecting")
            self.line("reader_met", at + 0.001, P, reader=rank)
            self.line("peer_changed", at + 0.002, rank, peer=P, before="connecting", state="loading")

    def complete(self, number: int, at: float, rank: str = D[0], seconds: float = 0.01) -> None:
        """A request that goes well: lent, pulled, granted, read, released."""
        ids: dict[str, Any] = {"request_id": f"chat-{number}", "sequence": number}
        pull = f"{rank[-8:]}{rank[-8:]}-{number}"
        self.line("lease_lent", at, P, **ids, blocks=3, lease_s=30.0)
        self.line("lease_granted", at + 0.003, P, **ids, reader=rank, pull_id=pull, seconds=10.0, after_s=0.003)
        # A detail too small to see, and one that is too wide for a column, are in there.
        parts: dict[str, Any] = {
            "handshake": 0.0,
            "queue": 0.001,
            "plan": 0.001,
            "post": 0.0005,
            "read": seconds - 0.003,
        }
        self.line(
            "pull_ended",
            at + 0.001 + seconds,
            rank,
            cause="complete",
            request_id=f"gen-{number}",
            prefill_request_id=f"chat-{number}",
            pull_id=pull,
            sequence=number,
            peer="prefill",
            peer_ranks=[P],
            read_ranks=[P],
            seconds=seconds,
            bytes=4096,
            pieces=2,
            piece_bytes=8192,
            descriptors=12,
            posts=1,
            rereads=0,
            phases={**parts, "detect": 0.0001, "confirm": 0.001, "release": 0.0},
        )
        self.line(
            "lease_ended",
            at + 0.002 + seconds,
            P,
            cause="released",
            **ids,
            seconds=seconds + 0.002,
            readers={rank: "complete"},
            blocks=3,
        )

    def failed(self, number: int, at: float, rank: str = D[1]) -> None:
        """A request whose transfer fails, is tried again, and succeeds; its lease knows every step."""
        ids: dict[str, Any] = {"request_id": f"chat-{number}", "sequence": number}
        one, two = f"{rank[-8:]}{rank[-8:]}-{number}", f"{rank[-8:]}{rank[-8:]}-{number + 1}"
        self.line("lease_lent", at, P, **ids, blocks=2, lease_s=30.0)
        common: dict[str, Any] = {
            "request_id": f"gen-{number}",
            "prefill_request_id": f"chat-{number}",
            "sequence": number,
        }
        common |= {"peer": "prefill", "peer_ranks": [P], "read_ranks": [P]}
        self.line(
            "pull_ended",
            at + 0.4,
            rank,
            "warning",
            cause="read_failed",
            failed_in="read",
            detail="a transfer failed: \x1b[31mremote disconnect",
            **common,
            pull_id=one,
            seconds=0.3,
            phases={"handshake": 0.0, "queue": 0.01, "plan": 0.01, "post": 0.001, "read": 0.18, "drain": 0.1},
            history=[
                [0.0, "announced"],
                [0.05, "connecting"],
                [0.06, "queued"],
                [0.07, "reading"],
                [0.08, {"note": "promised", "rank": P, "seconds": 10.0}],
                [0.25, "read_failed: a transfer failed"],
                [0.25, "draining"],
                [0.35, "notifying"],
            ],
        )
        again: dict[str, Any] = {"request_id": f"gen-{number}", "pull_id": one, "attempt": 2}
        self.line("pull_retried", at + 0.4, rank, cause="read_failed", **again, after_s=0.5)
        self.line("blocks_returned", at + 0.6, rank, "warning", **again, seconds_after_failure=0.2)
        self.line(
            "pull_ended",
            at + 1.0,
            rank,
            cause="complete",
            attempt=2,
            **common,
            pull_id=two,
            seconds=0.1,
            phases={"queue": 0.01, "plan": 0.01, "read": 0.07, "confirm": 0.01},
        )
        first, second = ({"reader": rank, "pull_id": pull} for pull in (one, two))
        steps = [
            [0.0, "lent"],
            [0.12, {"note": "granted", **first}],
            [0.41, {"note": "released", **first, "outcome": "retry"}],
            [0.91, {"note": "granted", **second}],
            [1.01, {"note": "released", **second, "outcome": "complete"}],
            [1.01, "released"],
        ]
        self.line(
            "lease_ended",
            at + 1.01,
            P,
            cause="released",
            **ids,
            seconds=1.01,
            readers={rank: "complete"},
            blocks=2,
            history=steps,
        )

    def expired(self, number: int, at: float) -> None:
        """A lease that nobody claims."""
        ids: dict[str, Any] = {"request_id": f"chat-{number}", "sequence": number}
        self.line("lease_lent", at, P, **ids, blocks=7, lease_s=30.0)
        held = [{**ids, "lent_s": 10.0, "left_s": 20.0, "claims": {}}]
        waits: dict[str, Any] = {"state": "lent", "waits": "not claimed by any reader", "requests": 1}
        self.line("lease_held", at + 10, P, "warning", **waits, oldest=held)
        why: dict[str, Any] = {"cause": "expired", "owed": ["*"], "history": [[0.0, "lent"], [30.0, "expired"]]}
        self.line("lease_ended", at + 30, P, "warning", **ids, seconds=30.0, readers={}, blocks=7, **why)

    def announced(self, number: int, at: float, rank: str = D[0]) -> None:
        """An announcement that has not been pulled when the log ends."""
        pull = f"{rank[-8:]}{rank[-8:]}-{number}"
        entry: dict[str, Any] = {"request_id": f"gen-{number}", "prefill_request_id": f"chat-{number}", "pull_id": pull}
        entry |= {"sequence": number, "state_s": 10.0, "left_s": 290.0, "ranks": {P: "granted"}}
        waits: dict[str, Any] = {"state": "announced", "waits": "announced and never pulled", "requests": 1}
        self.line("pull_held", at + 10, rank, "warning", **waits, oldest=[entry])

    def write(self, directory: Path, name: str = "all.log") -> str:
        """Write them into a file, in the order of true time."""
        path = directory / name
        path.write_text("".join(f"{text}\n" for _, text in sorted(self.lines)))
        return str(path)


def service() -> Written:
    """A little of everything."""
    written = Written()
    written.begin()
    for i in range(8):
        written.complete(i, 1.0 + 0.02 * i, D[i % 2], 0.005 + 0.001 * i)
    written.failed(8, 2.0)
    written.expired(20, 3.0)
    written.announced(21, 4.0)
    written.line("loop_was_away", 2.2, D[1], "warning", seconds=0.15, leases=0, pulls=1, parked=0)
    written.line("engine_stopped", 34.0, D[0])
    return written
