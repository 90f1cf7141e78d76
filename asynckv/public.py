"""Public names that load on first use: a package's stub says where each one is, to type checkers and to Python."""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Any


def homes(package: str) -> dict[str, str]:
    """Return the module of each name that `__init__.pyi` of a package imports."""
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def lazily(package: str) -> tuple[list[str], Callable[[str], Any]]:
    """Return the public names of a package, and its `__getattr__`, which imports the module of a name."""
    found = homes(package)

    def get(name: str) -> Any:
        if name not in found:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(found[name]), name)

    return sorted(found), get
