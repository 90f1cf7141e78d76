"""Which release of asynckv this is: what logs, metrics and answers to questions say of a process."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

__all__ = ["release"]


@functools.cache
def release() -> str:
    """Name the release, or say `unknown` where the package lies in a folder and is not installed.

    An engine serves there as well. Looking costs a millisecond.
    """
    try:
        return version("asynckv")
    except PackageNotFoundError:
        return "unknown"
