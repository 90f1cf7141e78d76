"""Checks of callers' arguments, before any effect.

A check returns the value in the form that the library uses, or raises the error that the caller chose. The message
names the argument, the value and the expected form.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Real
from typing import Any, TypeVar

from asynckv.errors import AsyncKVError, LocalProtocolError

MAX_INTEGER = 1 << 53  # largest count, because every count fits into a message and an array
MAX_NAME = 512  # most characters of a name: of an engine, a layer, a part, an address
MAX_TEXT = 16 * 1024

MAX_TYPED = 64
"""Most characters of a mistyped name that are compared, because the time grows with the square of the length."""

NO_SEQUENCE = (str, bytes, bytearray, memoryview, Mapping)
"""Iterable types that are never meant as a list of items."""

Refusal = type[AsyncKVError]
T = TypeVar("T")

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: object) -> str:
    """Write a value for an error's message: always short, and never with a lone surrogate."""
    try:
        return _short.repr(value)
    except Exception:  # a repr may run any code, and the refusal matters more
        return f"an object of type {type(value).__name__}"


def integer(name: str, value: Any, lo: int = 0, hi: int = MAX_INTEGER, error: Refusal = LocalProtocolError) -> int:
    """Check an integer in `[lo, hi]`: every type with `operator.index`, also numpy's, but no bool."""
    if type(value) is int:
        found = value
    else:
        try:
            found = lo - 1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            found = lo - 1
    if lo <= found <= hi:
        return found
    raise error(f"{name} is {shown(value)}; it must be an integer from {_bound(lo)} to {_bound(hi)}")


def _bound(value: int) -> str:
    is_large_power = value.bit_count() == 1 and value.bit_length() > 32
    return f"{'-' if value < 0 else ''}2^{value.bit_length() - 1}" if is_large_power else str(value)


def number(name: str, value: Any, lo: float, hi: float = math.inf, error: Refusal = LocalProtocolError) -> float:
    """Check a finite number in `[lo, hi]`, of any real type but bool."""
    if (as_float := _as_float(value)) is not None and lo <= as_float <= hi:
        return as_float
    bounds = f"of {lo:g} or more" if hi == math.inf else f"from {lo:g} to {hi:g}"
    raise error(f"{name} is {shown(value)}; it must be a finite number {bounds}")


def seconds(name: str, value: Any, error: Refusal = LocalProtocolError) -> float:
    """Check a duration above 0."""
    if (as_float := _as_float(value)) is not None and as_float > 0:
        return as_float
    raise error(f"{name} is {shown(value)}; it must be a positive, finite number of seconds")


def _as_float(value: Any) -> float | None:
    if type(value) is not float:
        try:
            value = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
        except OverflowError:
            return None
    return value if math.isfinite(value) else None


def is_text(value: Any, most: int = MAX_TEXT, least: int = 0) -> bool:
    """Return True if a value is text that can be sent: of a valid length, and without lone surrogates."""
    if not isinstance(value, str) or not least <= len(value) <= most:
        return False
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return False
    return True


def text(name: str, value: Any, most: int = MAX_TEXT, least: int = 0, error: Refusal = LocalProtocolError) -> str:
    """Check text of `least` to `most` characters of valid Unicode."""
    if type(value) is str and least <= len(value) <= most and value.isascii():
        return value
    if is_text(value, most, least):
        return str(value)
    length = f" ({len(value)} characters)" if isinstance(value, str) else ""
    raise error(
        f"{name} is {shown(value)}{length}; it must be a str of {least} to {most} characters, without lone surrogates"
    )


def texts(name: str, value: Any, most: int, longest: int, error: Refusal = LocalProtocolError) -> tuple[str, ...]:
    """Check a sequence of at most `most` texts of at most `longest` characters; one text is no sequence of texts."""
    if type(value) is tuple and not value:
        return value
    if type(value) is list or (isinstance(value, Iterable) and not isinstance(value, NO_SEQUENCE)):
        try:
            found = tuple(value)
        except TypeError:  # a tensor without dimensions claims to be iterable
            found = (None,)
        if _are_texts(found, most, longest):
            return tuple(map(str, found))
    raise error(
        f"{name} is {shown(value)}; it must be a sequence of at most {most} str of at most {longest} characters each, "
        f"without lone surrogates"
    )


def _are_texts(found: tuple[Any, ...], most: int, longest: int) -> bool:
    if len(found) > most or not all(issubclass(kind, str) for kind in set(map(type, found))):
        return False
    # A few calls check all of them, because a long prompt has thousands.
    return max(map(len, found), default=0) <= longest and is_text("".join(found), most * longest)


def flag(name: str, value: Any, error: Refusal = LocalProtocolError) -> bool:
    """Check a bool."""
    if isinstance(value, bool):
        return value
    raise error(f"{name} is {shown(value)}; it must be True or False")


def nearest(name: object, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the known name that a mistyped one is most like, or nothing if it is like none."""
    near = difflib.get_close_matches(str(name)[:MAX_TYPED], list(known), 1, cutoff)
    return near[0] if near else ""


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return the nearest known name as the end of an error's sentence, or nothing."""
    return f"; did you mean {near!r}?" if (near := nearest(name, known)) else ""


def one_of(name: str, value: Any, known: Iterable[str], error: Refusal = LocalProtocolError) -> str:
    """Check one of the known names."""
    known = tuple(known)
    if isinstance(value, str) and value in known:
        return value
    raise error(f"{name} {shown(value)} is unknown; use one of {', '.join(known)}{did_you_mean(value, known)}")


def without_control(text: str) -> str:
    """Show control characters as escapes, because foreign text must not move a cursor or begin a line."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def each_text(value: T, change: Callable[[str], str]) -> T:
    """Return a value with every string in it changed: also in the keys and values of dicts, lists and tuples."""
    out: object = value
    if isinstance(value, str):
        out = change(value)
    elif isinstance(value, dict):
        out = {each_text(k, change): each_text(v, change) for k, v in value.items()}
    elif isinstance(value, list | tuple):
        out = (tuple if isinstance(value, tuple) else list)(each_text(x, change) for x in value)
    return out  # type: ignore[return-value]


def is_loopback_host(host: str) -> bool:
    """Return True if a name or an IP address belongs to this host only."""
    with suppress(ValueError):
        return host == "localhost" or ipaddress.ip_address(host.strip("[]").partition("%")[0]).is_loopback
    return False
