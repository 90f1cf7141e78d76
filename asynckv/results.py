"""What the engine's calls return: plain, frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynckv.geometry.pairing import Padding


@dataclass(frozen=True, slots=True)
class PullResult:
    """A pull that ended well: every byte is in place and provably what was lent.

    Attributes:
        request_id: The decode side's id.
        pull_id: The id of the attempt that succeeded, as in the logs.
        num_bytes: Bytes of KV that were read.
        num_posts: NIXL transfers that this took.
        descriptors_planned: Pieces before NIXL merged neighbours.
        descriptors_posted: Pieces after that.
        phases: Seconds by phase: `handshake`, `queue`, `plan`, `read`, `confirm`. The `release` still goes on.
        padding: Tokens after `num_tokens` in the given blocks: they hold no KV of the request, and the engine has to
            ignore them. States have none. It does not list tokens before a sliding window, in the block where the
            window begins.
        num_tokens: Tokens of the request that are valid here now: all, or those on which the hashes of both sides
            agree.
        attempts: How many attempts it took.
    """

    request_id: str
    pull_id: str
    num_bytes: int
    num_posts: int
    descriptors_planned: int
    descriptors_posted: int
    phases: Mapping[str, float]
    padding: tuple[Padding, ...]
    num_tokens: int
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """How a lent request ended.

    Attributes:
        request_id: The prefill side's id.
        cause: `released`, `expired` or `revoked`; `closed` if the engine closed before its promises had run out (nobody
            may write the blocks then before the process ends; see `Engine.aclose`).
        readers: The ranks that released it (`decode/tp0`, whichever process that was), and how their attempts ended:
            `complete`, `failed` or `cancelled`.
        owed: The readers that never released it; `*` for a cohort (the ranks of one decode engine) that
            never claimed it.
        held_s: How long it was lent.
    """

    request_id: str
    cause: str
    readers: Mapping[str, str]
    owed: tuple[str, ...]
    held_s: float


@dataclass(frozen=True, slots=True)
class Statistics:
    """A snapshot of one engine.

    Attributes:
        counters: What happened since the start, by name. They only grow, also over a sleep: the difference of two
            snapshots is what happened between them. Exceptions: names that begin with `control.` or `data.` belong to
            the planes; some of them say how things are now, and those of `data.` begin again when an engine resumes. So
            do some of `offload.`.
        gauges: What is owed and held now, by name.
        release_s: How long the last releases took in the background, oldest first.
        loop_lag_s: How late the engine's timer fired the last time: for so long the event loop did something else.
        loop_lag_most_s: The longest of these. `counters["loop.was_away"]` counts those above `log.away_s`.
        loop_lags: How often the timer fired how late, as a histogram: keys are upper bounds in seconds, as text, or
            `inf`.
    """

    counters: Mapping[str, int]
    gauges: Mapping[str, int]
    release_s: tuple[float, ...]
    loop_lag_s: float
    loop_lag_most_s: float
    loop_lags: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of blocks that were to be stored. The store uses none of them any more.

    Attributes:
        request_id: As given to `Offload.store`.
        num_blocks: Blocks, over all groups, that are in the host tier now: stored by this call or before.
        num_new: Those of them that this call has copied.
        num_missed: Blocks that are not there: there was no room (all that could make room is in use, or the prompt is
            larger than the tier), or their copy failed.
        num_bytes: Bytes that were copied.
        seconds: From the call to its end.
    """

    request_id: str
    num_blocks: int
    num_new: int
    num_missed: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """What was loaded: a prefix of what was asked for. Every byte of it is what was stored.

    Attributes:
        request_id: As given to `Offload.load`.
        num_tokens: Tokens whose KV is in place in all groups now; the engine computes the rest. They are fewer than
            were asked for if blocks had been given up meanwhile, could not be read, or were not what was stored.
        num_blocks: Blocks that were loaded, over all groups.
        num_bytes: Bytes that were copied into them.
        file_bytes: Bytes that had to come from files first.
        seconds: From the call to its end.
    """

    request_id: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    file_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """What became of blocks that were to be given up. A block that is in both tiers counts twice.

    Attributes:
        num_blocks: Blocks that nobody finds any more.
        num_pinned: Blocks that are still kept, because they are pinned or lent.
    """

    num_blocks: int
    num_pinned: int
