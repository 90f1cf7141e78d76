"""Gathers facts of what is installed and configured: packages, environment, keys, addresses. Loads no NIXL or torch."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import os
import platform
import re
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from asynckv.arguments import without_control
from asynckv.config import EngineConfig, KeysConfig
from asynckv.errors import AsyncKVError, BackendError, ConfigError
from asynckv.tools.doctor import host
from asynckv.tools.doctor.facts import KeyFacts, Listening, Software
from asynckv.version import VERSION

if TYPE_CHECKING:
    from asynckv.edges.zmq import ZmqPlane

PREFIXES = ("UCX_", "NIXL_")
SECRETS = ("TOKEN", "SECRET", "PASSWORD", "KEY")


def software() -> Software:
    variants = {name: _version(name.replace("_", "-")) for name in ("nixl_cu12", "nixl_cu13") if _is_there(name)}
    torch, cuda = _torch()
    # Only asked for its version: the control plane's file is the only one that uses it.
    zmq: Any = importlib.import_module("zmq")
    return Software(
        asynckv=VERSION,
        python=platform.python_version(),
        nixl=_version("nixl"),
        variants=variants,
        variant=_chosen(),
        torch=torch,
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
    from asynckv.edges import nixl

    try:
        return nixl._variant()  # the one truth, and it loads nothing
    except BackendError:
        return ""


def _torch() -> tuple[str, str]:
    """Return torch's version and that of its CUDA, from its files: importing it takes seconds."""
    with suppress(ImportError, ValueError, OSError):
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.origin:
            text = (Path(spec.origin).parent / "version.py").read_text()
            name = re.search(r"__version__\s*=\s*['\"]([^'\"]+)", text)
            cuda = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)", text, re.MULTILINE)
            return name[1] if name else _version("torch"), cuda[1] if cuda else ""
    return "", ""


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


# -- keys ------------------------------------------------------------------------------------------------


def keys(secret: str, authorized: str) -> KeyFacts:
    """Look at an engine's keys as the engine would, and at who else may."""
    from asynckv.edges import zmq
    from asynckv.keys import AllowList, read_pair

    mode, owner, public, refused = 0, os.geteuid(), b"", ""
    with suppress(OSError, ValueError):
        status = os.stat(secret)
        mode, owner = status.st_mode & 0o7777, status.st_uid
    allowed: AllowList | None = None
    authorized_error = ""
    try:
        allowed = AllowList(Path(authorized))
    except ConfigError as exc:
        authorized_error = str(exc)
    try:
        public = read_pair(Path(secret)).public
        if allowed is not None:
            zmq._load(KeysConfig(secret=secret, authorized=authorized))  # that the pair belongs together
    except ConfigError as exc:
        refused = str(exc)
    return KeyFacts(
        secret=secret,
        mode=mode,
        owner=owner,
        secret_error=refused,
        authorized=authorized,
        authorized_error=authorized_error,
        num_authorized=len(allowed) if allowed is not None else 0,
        own_listed=allowed is None or not public or public in allowed,
    )


# -- addresses ---------------------------------------------------------------------------------------------


def read_config(path: Path) -> EngineConfig:
    """Read an engine's configuration from JSON: the fields of `EngineConfig`."""
    try:
        given = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        known = [field.name for field in dataclasses.fields(EngineConfig)]
        if unknown := sorted(given.keys() - known):
            raise TypeError(f"no field {', '.join(map(repr, unknown))}; there are {', '.join(known)}")
        for field in dataclasses.fields(EngineConfig):
            # Sections are made by their own class; the rest an `EngineConfig` checks itself.
            section: Any = KeysConfig if field.name == "keys" else field.default_factory
            if given.get(field.name) is not None and section is not dataclasses.MISSING:
                given[field.name] = section(**msgspec.convert(given[field.name], dict[str, Any]))
        return EngineConfig(**({"engine_id": "doctor"} | given))
    except (OSError, msgspec.MsgspecError, TypeError) as exc:
        text = without_control(str(exc))
        raise ConfigError(f"--config {str(path)!r}: {text}; give the fields of EngineConfig as JSON") from exc


def listening(config: EngineConfig) -> Listening:
    """Try what an engine would do with its addresses."""
    from asynckv.edges.zmq import ZmqPlane

    error = bind_error = ""
    try:
        plane = ZmqPlane(config.bind, config.advertise, config.allow_insecure or config.keys is not None)
    except AsyncKVError as exc:
        error = str(exc)
    else:
        try:
            asyncio.run(_listen(plane))
        except AsyncKVError as exc:
            bind_error = str(exc)
    name = config.advertise.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return Listening(
        bind=config.bind,
        advertise=config.advertise,
        allow_insecure=config.allow_insecure,
        has_keys=config.keys is not None,
        advertise_addresses=host.resolve(name)[0] if name else (),
        bind_error=bind_error,
        error=error,
        error_mode=config.nixl.params.get("ucx_error_handling_mode", "peer"),
        process=config.nixl.process,
    )


async def _listen(plane: ZmqPlane) -> None:
    try:
        await plane.start(lambda origin, data, principal: None)
    finally:
        await plane.aclose()
