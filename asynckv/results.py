"""What the engine's calls return: plain, frozen values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynckv.geometry.pairing import Padding

__all__ = ["Evicted", "LeaseEnd", "Loaded", "PullResult", "Statistics", "Stored"]


@dataclass(frozen=True, slots=True)
class PullResult:
    """A pull that ended well: every byte is in place and provably what was lent.

    Attributes:
        num_bytes: Payload that landed.
        num_posts: NIXL transfers it took.
        descriptors_planned: Contiguous pieces before merging.
        descriptors_posted: What they came to after NIXL merged neighbours.
        phases: Seconds by phase (see `asynckv.observe.log.phases`); `release` is still going on.
        padding: Tokens after `num_tokens` in the given blocks, which hold no KV of the request, for the engine to
            ignore. States have none. Of tokens before a sliding window, in the block where it begins, nothing is said.
        num_tokens: Tokens of the request that are valid here now: all, or those on which hashes agree.
        attempts: How many it took.
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
        cause: `released`, `expired` or `revoked`; `closed` if the engine was closed with it (in less time than its
            promises ran: nobody may write the blocks before the process ends; see `Engine.aclose`).
        readers: Who released it (`decode/tp0`, whichever process that was), and how their attempts ended.
        owed: Readers that never did; `*` for a cohort that never spoke up.
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
        counters: What happened since the start, by name; they only grow, also over a sleep, so that the difference of
            two snapshots is what happened between. But those that begin with `control.` or `data.` are the planes' own:
            some say how things are now, and those of `data.` begin again when an engine resumes; so do some of
            `offload.`, which are its offload's.
        gauges: What is owed and held now.
        release_s: The last releases' durations in the background, oldest first.
        loop_lag_s: How late the engine's timer fired the last time, and so how long the event loop was away, doing
            something else; `loop_lag_most_s` is the longest, and `counters["loop.was_away"]` says how often it was
            longer than `log.away_s`.
        loop_lags: How often the timer fired how late: keys are the most seconds, as text, or `inf`.
    """

    counters: Mapping[str, int]
    gauges: Mapping[str, int]
    release_s: tuple[float, ...]
    loop_lag_s: float
    loop_lag_most_s: float
    loop_lags: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """What became of blocks that were to be stored. None of them is in use for it any more.

    Attributes:
        num_blocks: Blocks, over all groups, that are in the host tier now: stored by this call or before.
        num_new: Those of them that this call has copied.
        num_missed: Blocks that are not there: no room (all that could make room is in use, or all of the prompt is more
            than the tier holds), or their copy failed.
        num_bytes: Bytes copied.
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
    """What was loaded: a prefix of what was asked for, and every byte of it is what was stored.

    Attributes:
        num_tokens: Tokens whose KV is in place in all groups now; what is above is not, and is to be computed. Less
            than were asked for if blocks had been given up meanwhile, or could not be read, or were not what was
            stored.
        num_blocks: Blocks that were loaded, over all groups.
        num_bytes: Bytes copied into them.
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
    """What became of blocks that were to be given up; a block that is in both tiers counts twice.

    Attributes:
        num_blocks: Blocks that nobody finds any more.
        num_pinned: Blocks that are kept still, because they are pinned or lent.
    """

    num_blocks: int
    num_pinned: int
