"""The checks before a model is loaded: vLLM makes connectors only when the model is in memory, minutes later.

vLLM calls `watch` as a plug-in (`vllm.general_plugins`) in each process, before it makes a configuration, so a mistake
ends the command that has it. Without the plug-in (`VLLM_PLUGINS`, or a copy that is not installed) executors check as
soon as a connector is imported. The connectors' constructors check once more. A vLLM without a connector of asynckv has
the plug-in too: it imports nothing large there, and its own errors end no start.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from asynckv.errors import ConfigError
from asynckv.integrations.vllm import compat
from asynckv.integrations.vllm.offload.options import parse
from asynckv.integrations.vllm.options import WHERE, Options

_watched: set[Callable[..., None]] = set()


def watch() -> None:
    """Have configurations of vLLM checked as they are made. Idempotent."""
    _watch(compat.VllmConfig, "__post_init__")


def watch_executors() -> None:
    """Have configurations checked also before an executor loads a model. Idempotent."""
    watch()
    _watch(compat.Executor, "__init__")


def _watch(kind: type, name: str) -> None:
    made = getattr(kind, name, None)
    if made is not None and made not in _watched:
        _watched.add(checked := _checked(made))
        setattr(kind, name, checked)


def _checked(made: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(made)
    def check_and_make(*args: Any, **kwargs: Any) -> None:
        for each in (*args, *kwargs.values()):
            if isinstance(each, compat.VllmConfig):
                try:
                    check(each)
                except ConfigError:
                    raise
                except Exception as exc:
                    logging.getLogger(__name__).warning("asynckv could not check a configuration: %r", exc)
        made(*args, **kwargs)

    return check_and_make


def check(vllm_config: Any) -> None:
    """Raise `ConfigError` if a connector of asynckv could not start with a configuration. Others are not looked at."""
    if (transfer := vllm_config.kv_transfer_config) is None:
        return
    parallel = vllm_config.parallel_config
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    for name, extra, role in _connectors(transfer.kv_connector, transfer.kv_connector_extra_config, transfer.kv_role):
        if name == "AsyncKVConnector":
            check_parallel(parallel, role)
            Options.parse(extra).check_addresses()
        elif name == "DualConnector" and max(pcp, dcp) > 1:
            raise ConfigError(
                f"--decode-context-parallel-size {dcp}, --prefill-context-parallel-size {pcp}: NixlConnector counts "
                f"blocks in its own way, which DualConnector does not check; leave both at 1, or use AsyncKVConnector"
            )
        elif extra.get("spec_name") == "AsyncKVOffloadingSpec" and parse(extra, "checked", 1).directory and dcp > 1:
            raise ConfigError(
                f"--decode-context-parallel-size {dcp}: the records in {WHERE}.directory do not say which tokens a "
                f"rank has (--cp-kv-cache-interleave-size); leave directory out, or the size at 1"
            )


def _connectors(name: Any, extra: Any, role: Any) -> Iterator[tuple[Any, Mapping[str, Any], Any]]:
    """Yield each connector's name, options and role, also of those within another. They refuse other forms by name."""
    if not isinstance(extra, Mapping):
        return
    yield name, extra, role
    if name == "DualConnector":
        yield from _connectors("AsyncKVConnector", extra.get("asynckv", {}), role)
    within = extra.get("connectors", ()) if name == "MultiConnector" else ()
    for each in within if isinstance(within, list | tuple) else ():
        if isinstance(each, Mapping):
            inner = each.get("kv_connector"), each.get("kv_connector_extra_config", {}), each.get("kv_role", role)
            yield from _connectors(*inner)


def check_parallel(parallel: Any, role: str) -> None:
    """Raise `ConfigError` for a mix of parallel ranks, or a role of theirs, that cannot be served."""
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if pcp == 1:
        return
    if role != "kv_producer":
        raise ConfigError(
            f"--prefill-context-parallel-size {pcp} with kv_role {role!r}: ranks that share prefills only lend; set "
            f"kv_role to 'kv_producer', or leave the size at 1"
        )
    if dcp > 1 and (dcp != pcp or parallel.tensor_parallel_size > 1):
        raise ConfigError(
            f"--prefill-context-parallel-size {pcp}, --decode-context-parallel-size {dcp}, --tensor-parallel-size "
            f"{parallel.tensor_parallel_size}: tokens are shared among all of one axis only; set the second size to 1, "
            f"or to {pcp} with a tensor-parallel size of 1"
        )
