"""Results of the engine's calls: plain, frozen values."""

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
        num_bytes: Bytes of KV that this pull read, without those of pieces.
        num_posts: NIXL transfers that were posted.
        descriptors_planned: Pieces before NIXL merged neighbours.
        descriptors_posted: Pieces after merging.
        phases: Seconds by phase: `handshake`, `queue`, `plan`, `read`, `confirm`. The `release` continues in the
            background.
        padding: Tokens after `num_tokens` in the given blocks. They hold no KV of the request, so the engine has to
            ignore them. States have none. Tokens before a sliding window, in the block where the window begins, are not
            listed.
        num_tokens: Tokens of the request that are valid here now: all, or those on which both sides' hashes agree.
        attempts: Number of attempts that were made.
        num_pieces: Pieces that were read before, in a head start.
        piece_bytes: Bytes of KV that they brought.
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
    num_pieces: int = 0
    piece_bytes: int = 0


@dataclass(frozen=True, slots=True)
class LeaseEnd:
    """The end of a lent request.

    Attributes:
        request_id: The prefill side's id.
        cause: `released`, `expired` or `revoked`; `closed` if the engine closed before its grants had ended (the
            blocks must then not be written before the process ends; see `Engine.aclose`).
        readers: Ranks that released it (`decode/tp0`, in any of its processes) to the outcome of their attempts:
            `complete`, `failed` or `cancelled`.
        owed: Up to 64 readers that never released it; `*` for a cohort (the ranks of one decode engine) that never
            claimed it.
        held_s: Seconds for which it was lent.
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
        counters: Numbers of events since the start, by name. They only grow, also over a sleep. Exceptions: names that
            begin with `control.` or `data.` belong to the planes. Some of them are gauges, and those of `data.`, like
            some of `offload.`, start again at 0 when an engine resumes.
        gauges: Present numbers of owed and held requests and blocks, by name.
        release_s: Seconds that the last releases took in the background, oldest first.
        loop_lag_s: Delay of the engine's timer at its last call, in which the event loop did something else.
        loop_lag_most_s: Longest of these delays. `counters["loop.was_away"]` counts those above `log.away_s`.
        loop_lags: Histogram of these delays: keys are upper bounds in seconds, as text, or `inf`.
    """

    counters: Mapping[str, int]
    gauges: Mapping[str, int]
    release_s: tuple[float, ...]
    loop_lag_s: float
    loop_lag_most_s: float
    loop_lags: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Stored:
    """The end of a store. It uses none of the caller's blocks any more.

    Attributes:
        request_id: As given to `Offload.store`.
        num_blocks: Blocks, over all groups, that are in the host tier now: stored by this call or before.
        num_new: Those of `num_blocks` that this call has copied.
        num_missed: Blocks that are not in the host tier, because there was no room (all evictable blocks are in use, or
            the prompt is larger than the tier) or because their copy failed.
        num_bytes: Bytes that were copied.
        seconds: Time from the call to its end.
    """

    request_id: str
    num_blocks: int
    num_new: int
    num_missed: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """The end of a load: a prefix of the requested tokens. Every byte of it is as it was stored.

    Attributes:
        request_id: As given to `Offload.load`.
        num_tokens: Tokens with KV in place in all groups now; the engine computes the rest. They are fewer than
            requested if blocks had been evicted meanwhile, could not be read, or differed from the stored bytes.
        num_blocks: Blocks that were loaded, over all groups.
        num_bytes: Bytes that were copied into them.
        file_bytes: Bytes that had to come from files first.
        seconds: Time from the call to its end.
    """

    request_id: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    file_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Evicted:
    """The result of an eviction. A block that is in both tiers counts twice.

    Attributes:
        num_blocks: Blocks that lookups no longer find.
        num_pinned: Blocks that are still kept, because they are pinned or lent.
    """

    num_blocks: int
    num_pinned: int
