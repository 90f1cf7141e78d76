"""Prompt lengths, shared prefixes, and the arrival times of a trace.

Two prompts share a prefix if they name the same leading *chunks*: pieces of `chunk_tokens` tokens. As `hash_ids` do in
Mooncake's traces, a chunk's id stands for its own tokens and all tokens before them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from asynckv.errors import ConfigError

TRACE_CHUNK_TOKENS = 512  # per entry of a trace's `hash_ids`
SHARED_CHUNK_TOKENS = 16

_MOST_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send.

    `num_capped` prompts were shortened by `--max-prompt-tokens`. `chunks` are the ids of each request's leading chunks,
    or empty if no prompts share any. `arrivals_s` is empty if the trace has no times.
    """

    source: str
    prompt_tokens: tuple[int, ...]
    num_capped: int = 0
    chunks: tuple[tuple[int, ...], ...] = ()
    chunk_tokens: int = TRACE_CHUNK_TOKENS
    arrivals_s: tuple[float, ...] = ()

    def capped(self, most: int | None) -> Workload:
        """Shorten the prompts that are longer than `most` tokens."""
        if most is None:
            return self
        lengths = tuple(min(n, most) for n in self.prompt_tokens)
        return replace(
            self,
            prompt_tokens=lengths,
            num_capped=sum(n > most for n in self.prompt_tokens),
            chunks=tuple(c[: -(-n // self.chunk_tokens)] for c, n in zip(self.chunks, lengths, strict=False)),
        )

    def sharing(self, tokens: int, groups: int, seed: int) -> Workload:
        """Begin every prompt with one of `groups` prefixes of `tokens` tokens, drawn at random."""
        if any(self.chunks):
            raise ConfigError(
                "--shared-prefix was given, but the hash_ids of the trace already define the shared prefixes; omit it"
            )
        if not 1 <= tokens <= _MOST_TOKENS:
            raise ConfigError(f"--shared-prefix {tokens} is outside 1 ... {_MOST_TOKENS} tokens")
        if not 1 <= groups <= _MOST_TOKENS:
            raise ConfigError(f"--shared-prefix {tokens}:{groups}: the prefixes are outside 1 ... {_MOST_TOKENS}")
        size = math.gcd(tokens, SHARED_CHUNK_TOKENS)
        longest = min(tokens, max(self.prompt_tokens, default=0)) // size
        drawn = np.random.default_rng([seed, 1]).integers(0, groups, len(self.prompt_tokens)).tolist()
        return replace(
            self,
            source=f"{self.source} sharing {groups} prefixes of {tokens}",
            chunks=tuple(
                tuple(range(g * longest, g * longest + min(tokens, n) // size))
                for g, n in zip(drawn, self.prompt_tokens, strict=True)
            ),
            chunk_tokens=size,
        )


def drawn(spec: str, requests: int, seed: int) -> Workload:
    """Make requests of one length (`1024`), of a range (`128:4096`), or of a mix (`128:0.8,8192:0.2`)."""
    if "," in spec:
        return _mixed(spec, requests, seed)
    low, _, high = spec.partition(":")
    try:
        lo, hi = int(low), int(high or low)
    except ValueError:
        lo, hi = 0, 0
    if not 1 <= lo <= hi <= _MOST_TOKENS:
        raise ConfigError(
            f"--prompt-tokens {spec!r} is not a length such as 1024, a range such as 128:4096, or a mix such as "
            f"128:0.8,8192:0.2 (1 ... {_MOST_TOKENS} tokens)"
        )
    if lo == hi:
        return Workload(f"fixed {lo}", (lo,) * requests)
    lengths = np.random.default_rng(seed).integers(lo, hi, requests, endpoint=True)
    return Workload(f"uniform {lo}:{hi}", tuple(lengths.tolist()))


def _mixed(spec: str, requests: int, seed: int) -> Workload:
    lengths, weights = [], []
    for part in spec.split(","):
        length, _, weight = part.partition(":")
        try:
            lengths.append(int(length))
            weights.append(float(weight))
        except ValueError:
            lengths.append(0)
        if not 1 <= lengths[-1] <= _MOST_TOKENS or not 0 < weights[-1] < math.inf:
            raise ConfigError(
                f"--prompt-tokens {spec!r}: {part!r} is no length and weight such as 128:0.8 (1 ... {_MOST_TOKENS} "
                f"tokens, a weight above 0); they make a mix such as 128:0.8,8192:0.2"
            )
    if math.isinf(total := sum(weights)):
        raise ConfigError(f"--prompt-tokens {spec!r}: the weights add up to {total}; use smaller ones")
    found = np.random.default_rng(seed).choice(np.array(lengths), requests, p=np.array(weights) / total)
    return Workload(f"mix {spec}", tuple(found.tolist()))


def traced(path: Path, requests: int | None) -> Workload:
    """Read the first requests of a trace in Mooncake's format: one JSON object per line.

    `input_length` (or `prompt_tokens`) is required. `timestamp` (milliseconds) and `hash_ids` (one per 512 tokens, and
    one for the remainder) are optional.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((i, line) for i, line in enumerate(file, 1) if line.strip())
            entries = [_entry(path, i, line) for i, line in islice(lines, requests)]
    except OSError as exc:
        raise ConfigError(f"--trace {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--trace {path}: is not UTF-8 text: {exc}") from exc
    if not entries:
        raise ConfigError(f"--trace {path}: holds no requests")
    if requests is not None and len(entries) < requests:
        raise ConfigError(f"--trace {path}: holds {len(entries)} requests, fewer than --requests {requests}")
    times = [e.timestamp for e in entries if e.timestamp is not None]
    if times and len(times) < len(entries):
        line = next(e.line for e in entries if e.timestamp is None)
        raise ConfigError(f"--trace {path} line {line}: has no timestamp, but other lines have; give every line one")
    for (before, after), entry in zip(pairwise(times), entries[1:], strict=False):
        if after < before:
            raise ConfigError(
                f"--trace {path} line {entry.line}: timestamp {after:g} is before {before:g} of the line above; sort "
                f"the file by timestamp"
            )
    return Workload(
        f"trace {path.name}",
        tuple(e.tokens for e in entries),
        chunks=tuple(e.hash_ids for e in entries) if any(e.hash_ids for e in entries) else (),
        arrivals_s=tuple((t - times[0]) / 1e3 for t in times),
    )


def cached_tokens(text: str, tokens: int) -> int:
    """Return the number of a prompt's cached tokens, given as a number (`512`) or a share (`50%`)."""
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else 0.0
        hit = int(tokens * share + 1e-6) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):
        share, hit = 0.0, -1
    if not 0 <= share <= 1 or hit < 0:
        raise ConfigError(f"--prefix-hit {text!r} is neither a number of tokens such as 512 nor a share such as 50%")
    return min(hit, tokens)


class _Entry(msgspec.Struct, frozen=True):
    input_length: Annotated[int, Meta(ge=1, le=_MOST_TOKENS)] | None = None
    prompt_tokens: Annotated[int, Meta(ge=1, le=_MOST_TOKENS)] | None = None
    timestamp: Annotated[float, Meta(ge=0, lt=1e15)] | None = None
    hash_ids: tuple[Annotated[int, Meta(ge=0, lt=1 << 62)], ...] = ()
    line: int = 0

    @property
    def tokens(self) -> int:
        return self.input_length or self.prompt_tokens or 0


_decoder = msgspec.json.Decoder(_Entry)


def _entry(path: Path, number: int, line: str) -> _Entry:
    where = f"--trace {path} line {number}"
    try:
        entry = _decoder.decode(line)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    if not entry.tokens:
        raise ConfigError(f"{where}: has neither input_length nor prompt_tokens")
    if entry.hash_ids and len(entry.hash_ids) != (need := -(-entry.tokens // TRACE_CHUNK_TOKENS)):
        raise ConfigError(
            f"{where}: hash_ids has {len(entry.hash_ids)} entries, but {entry.tokens} tokens need {need}: one per "
            f"{TRACE_CHUNK_TOKENS} tokens, and one for the remainder"
        )
    return msgspec.structs.replace(entry, line=number)
