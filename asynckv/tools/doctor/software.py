"""Gathers facts of what is installed and configured: packages, environment, keys, addresses. Loads no NIXL or torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from asynckv.edges.nic import nixl
from asynckv.errors import BackendError
from asynckv.tools.doctor.facts import Software
from asynckv.version import VERSION

PREFIXES = ("UCX_", "NIXL_")
SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def software() -> Software:
    variants = {name: _version(name.replace("_", "-")) for name in ("nixl_cu12", "nixl_cu13") if _is_there(name)}
    torch, cuda = nixl.torch_versions()
    # Only asked for its version: the control plane's file is the only one that uses it.
    zmq: Any = importlib.import_module("zmq")
    return Software(
        asynckv=VERSION,
        python=platform.python_version(),
        nixl=_version("nixl"),
        variants=variants,
        variant=_chosen(),
        torch=torch or _version("torch"),
        torch_cuda=cuda,
        pyzmq=str(zmq.__version__),
        libzmq=str(zmq.zmq_version()),
        curve=bool(zmq.has("curve")),
        environment={k: _shown(k, v) for k, v in sorted(os.environ.items()) if k.startswith(PREFIXES)},
        plugin_dir_error=_plugin_dir_error(os.environ.get("NIXL_PLUGIN_DIR")),
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _is_there(name: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(name) is not None
    return False


def _chosen() -> str:
    try:
        return nixl._variant()  # the one truth, and it loads nothing
    except BackendError:
        return ""


def _shown(name: str, value: str) -> str:
    return "..." if any(word in name for word in SECRETS) else value[:500]


def _plugin_dir_error(folder: str | None) -> str:
    if folder is None:
        return ""
    if not os.path.isdir(folder):
        return f"NIXL_PLUGIN_DIR={folder} is no directory"
    if not (Path(folder) / "libplugin_UCX.so").exists():
        return f"NIXL_PLUGIN_DIR={folder} holds no libplugin_UCX.so"
    return ""
