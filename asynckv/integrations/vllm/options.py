"""The options in `kv_connector_extra_config`: the sections of `EngineConfig` by their own names, and a few more.

They are read when vLLM makes its configuration (`early`), before a model is loaded, and again by both halves. Unknown
options are refused, and the error for an option of `NixlConnector` names its replacement here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from importlib.resources import files
from typing import Any, get_args, get_type_hints

from asynckv.arguments import MAX_NAME, did_you_mean, flag, integer, seconds, shown, text
from asynckv.config import EngineConfig, LeaseConfig, PullConfig
from asynckv.errors import ConfigError
from asynckv.geometry.bounds import MAX_TOKENS

TESTED_VERSIONS = ("0.33.0", "0.32.0")  # vLLM changes its connector interface without notice
WHERE = "kv_connector_extra_config"
LOOPBACK = "tcp://127.0.0.1:0"


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """The endpoint of a worker's metrics for Prometheus (`docs/metrics.md`), in addition to vLLM's own.

    Attributes:
        port: Port of the first worker; the others take the ports that follow.
        host: Address on which it listens.
        allow_remote: Allow addresses beyond loopback, where any client that reaches the port may read the metrics.
    """

    port: int
    host: str = "127.0.0.1"
    allow_remote: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "port", integer("port", self.port, 1, 65535, ConfigError))
        text("host", self.host, MAX_NAME, 1, ConfigError)
        flag("allow_remote", self.allow_remote, ConfigError)


DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    # vLLM reports the end of every request, so a request may wait in its queue for long. An announcement is kept for a
    # week, and a prefill engine keeps the blocks for a day while a living reader renews.
    "pull": {"announce_s": 7 * 86_400.0},
    "lease": {"max_lease_s": 86_400.0},
}
"""Defaults of the connector that differ from the engine's."""

NIXL_HOST, UPDATING = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

WORDS = tomllib.loads(files(__package__).joinpath("words.toml").read_text(encoding="utf-8"))
OF_NIXL_CONNECTOR: Mapping[str, str] = WORDS["of_nixl_connector"]
"""Options of `NixlConnector`, and their replacements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(EngineConfig):
    """`kv_connector_extra_config`, checked: `EngineConfig` without the engine's id, and options of the connector.

    Attributes:
        engine_id: Stands for the ids of the workers' engines (`engine_config`), and is no option.
        bind: Address of the first worker's control plane; the others take the ports that follow. With port 0 the
            system chooses a port for each.
        lease: See `LeaseConfig`. A prefilled request waits `lease_s` for a decode engine to ask for it.
        pull: See `PullConfig`. `timeout_s` limits a load, and `announce_s` the wait in vLLM's queue.
        metrics: Show each worker's engine to Prometheus; see `MetricsOptions`.
        turn_lease_s: Seconds that blocks wait for the next turn, if their request generated more than one token and is
            lent at its end.
        head_start_tokens: Tokens of the shortest prompt that may have a head start: finished chunks travel while its
            prefill engine computes the others. 0 for none.
        allow_unhashed: Read KV of params without hashes of their prompt, as engines other than vLLM may make them. Any
            client can then have any lent KV loaded for any prompt of the same length.
    """

    engine_id: str = "checked"
    lease: LeaseConfig = field(default_factory=lambda: LeaseConfig(**DEFAULTS["lease"]))
    pull: PullConfig = field(default_factory=lambda: PullConfig(**DEFAULTS["pull"]))
    metrics: MetricsOptions | None = None
    turn_lease_s: float = 480.0
    allow_unhashed: bool = False
    head_start_tokens: int = 32_768

    def __post_init__(self) -> None:
        flag("allow_unhashed", self.allow_unhashed, ConfigError)
        integer("head_start_tokens", self.head_start_tokens, 0, MAX_TOKENS, ConfigError)
        object.__setattr__(self, "turn_lease_s", seconds("turn_lease_s", self.turn_lease_s, ConfigError))
        if not 2 <= self.turn_lease_s <= self.lease.max_lease_s:
            raise ConfigError(
                f"turn_lease_s {self.turn_lease_s:g} is outside [2, lease.max_lease_s {self.lease.max_lease_s:g}] "
                f"seconds; lower it, or raise lease.max_lease_s"
            )
        EngineConfig.__post_init__(self)

    def has_head_start(self, num_tokens: int) -> bool:
        return 0 < self.head_start_tokens <= num_tokens

    @classmethod
    def parse(cls, given: object) -> Options:
        values = dict(mapping(WHERE, given))
        for name in values:
            if (remedy := OF_NIXL_CONNECTOR.get(name)) is not None:
                raise ConfigError(f"{WHERE}.{name} is an option of NixlConnector; {remedy}")
        refuse_unknown(WHERE, values, [f.name for f in fields(cls) if f.name != "engine_id"])
        for name, hint in get_type_hints(cls).items():
            for kind in filter(is_dataclass, (hint, *get_args(hint))):  # sections, and those that may be None
                if values.get(name) is not None:
                    section = dict(mapping(f"{WHERE}.{name}", values[name]))
                    refuse_unknown(f"{WHERE}.{name}", section, [f.name for f in fields(kind)])
                    values[name] = made(f"{WHERE}.{name}", kind, {**DEFAULTS.get(name, {}), **section})
                elif name in values and kind is hint:
                    raise ConfigError(f"{WHERE}.{name} is None; give an object, or leave it out")
        options: Options = made(WHERE, cls, values)
        return options

    def engine_config(self, engine_id: str, number: int = 0) -> EngineConfig:
        """Return the configuration of a worker's engine.

        Args:
            number: Number of the worker among those with the same options; it is added to the first worker's port.
        """
        values = {f.name: getattr(self, f.name) for f in fields(EngineConfig)} | {"engine_id": engine_id}
        for name in ("bind", "advertise") if number else ():
            values[name] = _port_of(name, values[name], number)
        return EngineConfig(**values)

    def check_addresses(self) -> None:
        """Raise `ConfigError` if the addresses or the key files cannot be used."""
        from asynckv.edges.control.zmq import ZmqPlane

        try:
            ZmqPlane(self.bind, self.advertise, self.allow_insecure, self.keys)
        except ConfigError as exc:
            raise ConfigError(f"{WHERE}: {exc}") from exc


def remarks(options: Options, version: str, environment: Mapping[str, str], missing: Sequence[str] = ()) -> list[str]:
    """Return warnings about a start: an untested vLLM, names that it lacks (`compat`), and variables."""
    out = []
    if version.split("+")[0] not in TESTED_VERSIONS:
        out.append(
            f"AsyncKVConnector was tested with vLLM {', '.join(TESTED_VERSIONS)}, and this is {version}: vLLM's "
            f"connector interface changes between versions, so try it before you serve with it"
            + (f". It lacks {', '.join(missing)}, and AsyncKVConnector goes on without them" if missing else "")
        )
    if (host := environment.get(NIXL_HOST)) and options.bind == LOOPBACK:
        out.append(
            f"{NIXL_HOST}={shown(host)} is read only by NixlConnector, and AsyncKVConnector listens on "
            f'{options.bind}; set "bind": "tcp://{host}:0" in {WHERE}, and give keys'
        )
    if environment.get(UPDATING, "").strip().lower() in ("1", "true"):
        out.append(f"{UPDATING} is set: {WORDS['adapters']['reloaded']}")
    return out


def _port_of(name: str, address: str, number: int) -> str:
    host, _, port = address.rpartition(":")
    if not port.isdecimal() or int(port) == 0:
        return address
    if int(port) + number > 65535:
        raise ConfigError(f"{name} {address!r}: worker {number} would listen on port {int(port) + number}; lower it")
    return f"{host}:{int(port) + number}"


def mapping(where: str, given: object) -> Mapping[str, Any]:
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    raise ConfigError(f"{where} is {shown(given)}; it must be an object of names and values")


def refuse_unknown(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or "."
            raise ConfigError(f"{where} has no option {shown(name)}{hint} It takes {', '.join(known)}")


def made(where: str, kind: Any, values: Mapping[str, Any]) -> Any:
    try:
        return kind(**values)
    except ConfigError as exc:
        raise ConfigError(f"{where}: {exc}") from exc
    except TypeError as exc:  # a field without a default is missing
        missing = [f.name for f in fields(kind) if f.name not in values and f.default is f.default_factory is MISSING]
        raise ConfigError(
            f"{where} lacks {' and '.join(missing) or exc}; it takes {', '.join(f.name for f in fields(kind))}"
        ) from exc
