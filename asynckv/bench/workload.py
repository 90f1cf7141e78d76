"""Prompt lengths: fixed, drawn uniformly, or taken from a trace."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from asynckv.errors import ConfigError

__all__ = ["Workload", "cached_tokens", "drawn", "traced"]

_LENGTH_KEYS = ("input_length", "prompt_tokens")
_MOST_TOKENS = 1 << 30


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to send.

    Attributes:
        source: For the report.
        prompt_tokens: Length of every request's prompt.
        num_capped: How many of them `--max-prompt-tokens` shortened.
    """

    source: str
    prompt_tokens: tuple[int, ...]
    num_capped: int = 0

    def capped(self, most: int | None) -> Workload:
        """Shorten the prompts that are longer than `most` tokens."""
        if most is None:
            return self
        return Workload(
            self.source,
            tuple(min(n, most) for n in self.prompt_tokens),
            sum(n > most for n in self.prompt_tokens),
        )


def drawn(spec: str, requests: int, seed: int) -> Workload:
    """Make requests of one length (`1024`), or of lengths drawn from a range (`128:4096`).

    Raises:
        ConfigError: The range is empty or malformed.
    """
    low, _, high = spec.partition(":")
    try:
        lo, hi = int(low), int(high or low)
    except ValueError:
        lo, hi = 0, 0
    if not 1 <= lo <= hi <= _MOST_TOKENS:
        raise ConfigError(
            f"--prompt-tokens {spec!r} is neither a length such as 1024 nor a range such as 128:4096 "
            f"(1 ... {_MOST_TOKENS})"
        )
    if lo == hi:
        return Workload(f"fixed {lo}", (lo,) * requests)
    lengths = np.random.default_rng(seed).integers(lo, hi, requests, endpoint=True)
    return Workload(f"uniform {lo}:{hi}", tuple(lengths.tolist()))


def traced(path: Path, requests: int | None) -> Workload:
    """Read the first requests of a trace: one JSON object with an `input_length` per line.

    Raises:
        ConfigError: Names the file, the line and what is wrong with it.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = ((i, line) for i, line in enumerate(file, 1) if line.strip())
            lengths = tuple(_length(path, i, line) for i, line in islice(lines, requests))
    except OSError as exc:
        raise ConfigError(f"--trace {path}: {exc.strerror or exc}") from exc
    except UnicodeDecodeError as exc:
        raise ConfigError(f"--trace {path}: is not UTF-8 text: {exc}") from exc
    if not lengths:
        raise ConfigError(f"--trace {path}: holds no requests")
    if requests is not None and len(lengths) < requests:
        raise ConfigError(f"--trace {path}: holds {len(lengths)} requests, fewer than --requests {requests}")
    return Workload(f"trace {path.name}", lengths)


def cached_tokens(text: str, tokens: int) -> int:
    """Return how many of a prompt's tokens are cached: a number (`512`), or a share (`50%`).

    Raises:
        ConfigError: It is neither.
    """
    try:
        share = float(text[:-1]) / 100 if text.endswith("%") else 0.0
        hit = int(tokens * share + 1e-6) if text.endswith("%") else int(text)
    except (ValueError, OverflowError):
        share, hit = 0.0, -1
    if not 0 <= share <= 1 or hit < 0:
        raise ConfigError(f"--prefix-hit {text!r} is neither a number of tokens such as 512 nor a share such as 50%")
    return min(hit, tokens)


def _length(path: Path, number: int, line: str) -> int:
    where = f"--trace {path} line {number}"
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{where}: is not JSON: {exc}") from exc
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: is no JSON object")
    key = next((k for k in _LENGTH_KEYS if k in entry), None)
    if key is None:
        raise ConfigError(f"{where}: has neither {' nor '.join(_LENGTH_KEYS)}")
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_TOKENS:
        raise ConfigError(f"{where}: {key} is {value!r}, not a number of tokens of 1 or more")
    return value
