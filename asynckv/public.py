"""Public names that load on first use: a package's stub says where each one is, to type checkers and to Python."""

from __future__ import annotations

import ast
import pkgutil


def homes(package: str) -> dict[str, str]:
    """Return the module of each name that `__init__.pyi` of a package imports."""
    stub = ast.parse(pkgutil.get_data(package, "__init__.pyi") or b"")
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
