"""Move KV cache between prefill and decode workers: NIXL carries the bytes, ZMQ the control messages.

Public names load on first use (`__init__.pyi` says where they are), so that importing the package costs next to nothing
and brings in neither torch nor NIXL.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from asynckv.public import homes

_HOME = homes(__name__)
_NEEDS_EXTRA = {"asynckv.observe.endpoint", "asynckv.observe.metrics"}

__all__ = sorted(name for name, module in _HOME.items() if module not in _NEEDS_EXTRA)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from asynckv.version import VERSION

        return VERSION
    if name not in _HOME:
        raise AttributeError(f"module 'asynckv' has no attribute {name!r}")
    try:
        value = getattr(import_module(_HOME[name]), name)
    except ImportError as exc:
        if _HOME[name] not in _NEEDS_EXTRA:
            raise
        value = _without_extra(name, str(exc))
    globals()[name] = value
    return value


def _without_extra(name: str, remedy: str) -> type:
    """Make a class that can be imported and listed; making an object of it says which extra is missing."""

    def __init__(self: object, *args: object, **options: object) -> None:
        raise ImportError(remedy)

    return type(name, (), {"__init__": __init__, "__doc__": remedy})


def __dir__() -> list[str]:
    return sorted([*_HOME, "__version__"])
