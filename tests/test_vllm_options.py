"""What users may write into `kv_connector_extra_config`, and what they are told otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import uuid
from dataclasses import fields
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from asynckv.config import EngineConfig, OffloadConfig, PullConfig
from asynckv.errors import BackendError, ConfigError
from asynckv.integrations.vllm.early import check, watch
from asynckv.integrations.vllm.offload.options import OF_OTHER_SPECS, parse
from asynckv.integrations.vllm.offload.region import HEAD, Region, Shape, path_of, sweep
from asynckv.integrations.vllm.options import OF_NIXL_CONNECTOR, TESTED_VERSIONS, Options, remarks


def test_nothing_need_be_said() -> None:
    assert Options.parse({}) == Options()


def test_every_section_of_the_engine_has_its_own_name_here() -> None:
    names = {f.name for f in fields(Options)}
    assert {f.name for f in fields(EngineConfig)} <= names
    with pytest.raises(ConfigError, match="has no option 'engine_id'"):
        Options.parse({"engine_id": "prefill"})


def test_what_is_said_reaches_the_engine() -> None:
    options = Options.parse(
        {
            "bind": "tcp://10.0.0.1:0",
            "advertise": "tcp://node-1:5000",
            "keys": {"secret": "a.key_secret", "authorized": "keys"},
            "lease": {"lease_s": 60},
            "pull": {"timeout_s": 12, "retries": 2, "second_look": 0.01, "second_look_bytes": "all"},
            "nixl": {"backend": "UCX", "posting_threads": 1},
            "log": {"slow_s": 1},
            "limits": {"hellos_per_s": 9},
            "turn_lease_s": 100,
        }
    )
    config = options.engine_config("me")
    assert (config.engine_id, config.bind, config.advertise) == ("me", "tcp://10.0.0.1:0", "tcp://node-1:5000")
    assert config.keys is not None
    assert (config.lease.lease_s, config.pull.timeout_s, config.pull.retries) == (60.0, 12.0, 2)
    assert (config.pull.second_look, config.pull.second_look_bytes) == (0.01, "all")
    assert (config.nixl.posting_threads, config.log.slow_s, config.limits.hellos_per_s) == (1, 1.0, 9.0)


def test_workers_show_their_engines_on_ports_that_follow() -> None:
    options = Options.parse({"metrics": {"port": 9400}})
    assert options.metrics is not None
    assert (options.metrics.port, options.metrics.host, options.metrics.allow_remote) == (9400, "127.0.0.1", False)
    assert Options.parse({"metrics": None}).metrics is None
    assert not hasattr(options.engine_config("e"), "metrics")
    for given, says in (({}, "lacks port"), ({"port": 0}, "port is 0"), ({"port": 1, "path": "/"}, "no option 'path'")):
        with pytest.raises(ConfigError, match=says):
            Options.parse({"metrics": given})


def test_a_request_may_wait_in_the_queue_for_longer_than_an_engine_would_keep_it() -> None:
    for given in ({}, {"pull": {"timeout_s": 5}}, {"lease": {"lease_s": 5}}):
        options = Options.parse(given)
        assert options.pull.announce_s > 86_400 > PullConfig().announce_s
        assert options.lease.max_lease_s == 86_400
    assert Options.parse({"pull": {"announce_s": 9}}).pull.announce_s == 9


REFUSED: list[tuple[Any, str]] = [
    (None, "must be an object"),
    ([], "must be an object"),
    ({1: 2}, "must be an object"),
    ({"lease_s": 3}, "has no option 'lease_s'"),
    ({"lese": {}}, "did you mean 'lease'"),
    ({"lease": {"lease": 3}}, r"extra_config\.lease has no option 'lease'; did you mean 'lease_s'"),
    ({"lease": 3}, r"extra_config\.lease is 3"),
    ({"lease": None}, r"extra_config\.lease is None"),
    ({"lease": {"lease_s": "long"}}, r"extra_config\.lease: lease_s is 'long'"),
    ({"lease": {"lease_s": float("nan")}}, r"extra_config\.lease: lease_s"),
    ({"lease": {"lease_s": 100, "max_lease_s": 50}}, "max_lease_s 50"),
    ({"pull": {"retries": -1}}, r"extra_config\.pull: retries"),
    ({"pull": {"second_look": 1.5}}, r"extra_config\.pull: second_look is 1\.5; it must be a finite"),
    ({"pull": {"second_look_bytes": "some"}}, r"second_look_bytes is 'some'"),
    ({"nixl": {"params": [1]}}, r"nixl\.params"),
    ({"nixl": {"process": "maybe"}}, "process is 'maybe'"),
    ({"keys": {"secret": "a"}}, r"extra_config\.keys lacks authorized; it takes secret, authorized"),
    ({"keys": {"secret": "a", "authorized": "b"}, "allow_insecure": True}, "contradict"),
    ({"bind": "10.0.0.1"}, "not an address"),
    ({"bind": 3}, "bind is 3"),
    ({"allow_insecure": "yes"}, "allow_insecure is 'yes'"),
    ({"turn_lease_s": 0}, "turn_lease_s is 0"),
    ({"turn_lease_s": 1e6}, "turn_lease_s 1e.06 is outside"),
    ({"engine_id": "x"}, "no option 'engine_id'"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=lambda x: str(x)[:40])
def test_mistakes_are_refused_by_name(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options.parse(given)


ADDRESSES = [
    ({"bind": "tcp://0.0.0.0:0", "allow_insecure": True}, "extra_config: bind .* is a wildcard.*set advertise"),
    ({"bind": "tcp://10.0.0.1:0"}, "not a loopback address.*give keys"),
    ({"keys": {"secret": "/no/such.key_secret", "authorized": "/no/such"}}, "/no/such"),
]


@pytest.mark.parametrize(("given", "says"), ADDRESSES, ids=lambda x: str(x)[:40])
def test_what_could_not_listen_is_refused_before_a_model_is_loaded(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Options.parse(given).check_addresses()


def test_a_port_is_the_first_workers_and_the_others_have_those_that_follow() -> None:
    options = Options.parse({"bind": "tcp://127.0.0.1:5600", "advertise": "tcp://127.0.0.1:7000"})
    first, third = options.engine_config("e"), options.engine_config("e", 2)
    assert (first.bind, first.advertise) == ("tcp://127.0.0.1:5600", "tcp://127.0.0.1:7000")
    assert (third.bind, third.advertise) == ("tcp://127.0.0.1:5602", "tcp://127.0.0.1:7002")
    free = Options.parse({"bind": "tcp://[::1]:0"}).engine_config("e", 2)
    assert (free.bind, free.advertise) == ("tcp://[::1]:0", "")
    with pytest.raises(ConfigError, match="worker 6 would listen on port 65536; lower it"):
        Options.parse({"bind": "tcp://127.0.0.1:65530"}).engine_config("e", 6)


def test_what_can_listen_is_taken() -> None:
    Options.parse(
        {"bind": "tcp://0.0.0.0:0", "advertise": "tcp://10.0.0.1:0", "allow_insecure": True}
    ).check_addresses()


@pytest.mark.parametrize("name", OF_NIXL_CONNECTOR)
def test_whoever_comes_from_nixl_connector_is_told_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} is an option of NixlConnector; (say|leave it out|it belongs)"):
        Options.parse({name: 1})


def test_another_version_of_vllm_is_warned_of_with_those_that_were_tested() -> None:
    assert remarks(Options(), TESTED_VERSIONS[0], {}) == []
    assert remarks(Options(), f"{TESTED_VERSIONS[0]}+cpu", {}) == []
    (warning,) = remarks(Options(), "0.34.0", {})
    assert "0.33.0" in warning
    assert "0.34.0" in warning


def test_the_address_that_was_for_nixl_connector_is_not_taken_in_silence() -> None:
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3"}
    (warning,) = remarks(Options(), TESTED_VERSIONS[0], environment)
    assert '"bind": "tcp://10.1.2.3:0"' in warning
    assert remarks(Options.parse({"bind": "tcp://10.1.2.3:0"}), TESTED_VERSIONS[0], environment) == []


@pytest.mark.parametrize(("value", "is_warned"), [("1", True), (" True", True), ("0", False), ("", False)])
def test_a_start_that_lets_adapters_be_loaded_again_is_warned_of(value: str, is_warned: bool) -> None:
    said = remarks(Options(), TESTED_VERSIONS[0], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": value})
    assert len(said) == is_warned
    assert not said or "load them from a new path" in said[0]


def configuration(name: str = "AsyncKVConnector", **extra: Any) -> Any:
    parallel = SimpleNamespace(tensor_parallel_size=2, decode_context_parallel_size=1, prefill_context_parallel_size=1)
    transfer = SimpleNamespace(kv_connector=name, kv_connector_extra_config=extra, kv_role="kv_both")
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=transfer)


KEYS = {"secret": "/none/a.key_secret", "authorized": "/none"}
WITHIN = {"kv_connector": "AsyncKVConnector", "kv_connector_extra_config": {"lese": {}}}


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (configuration(lese={}), "no option 'lese'; did you mean 'lease'"),
        (configuration(bind="tcp://10.0.0.1:0", keys=KEYS), "/none"),
        (configuration("MultiConnector", connectors=[{"kv_connector": "Theirs"}, WITHIN]), "did you mean 'lease'"),
        (configuration("DualConnector", asynckv={"lese": {}}), "did you mean 'lease'"),
        (
            configuration("OffloadingConnector", spec_name="AsyncKVOffloadingSpec", host_byte=1 << 30),
            "did you mean 'host_bytes'",
        ),
    ],
    ids=["typed", "keys", "within", "dual", "offload"],
)
def test_a_configuration_is_checked_before_a_model_is_loaded(config: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check(config)


FILES = configuration(
    "OffloadingConnector", spec_name="AsyncKVOffloadingSpec", host_bytes=1 << 30, directory="/d", file_bytes=9
)


@pytest.mark.parametrize(
    ("config", "role", "pcp", "dcp", "says"),
    [
        (configuration(), "kv_both", 2, 1, "--prefill-context-parallel-size 2 with kv_role 'kv_both': .* only lend"),
        (configuration(), "kv_consumer", 2, 1, "set kv_role to 'kv_producer', or leave the size at 1"),
        (configuration(), "kv_producer", 4, 2, "-parallel-size 4, --decode-context-parallel-size 2, .* or to 4"),
        (configuration(), "kv_producer", 2, 2, "--tensor-parallel-size 2: .* or to 2 with a tensor-parallel size of 1"),
        (configuration("DualConnector"), "kv_both", 1, 2, "--decode-context-parallel-size 2, .*leave both at 1"),
        (
            FILES,
            "kv_both",
            1,
            2,
            "--decode-context-parallel-size 2: the records in .*directory .*leave directory out, or the size at 1",
        ),
    ],
)
def test_ranks_that_cannot_share_are_refused_before_a_model_is_loaded(
    config: Any, role: str, pcp: int, dcp: int, says: str
) -> None:
    parallel = SimpleNamespace(
        tensor_parallel_size=2, decode_context_parallel_size=dcp, prefill_context_parallel_size=pcp
    )
    with pytest.raises(ConfigError, match=says):
        check(
            SimpleNamespace(
                parallel_config=parallel,
                kv_transfer_config=SimpleNamespace(**vars(config.kv_transfer_config) | {"kv_role": role}),
            )
        )


def test_ranks_that_share_tokens_are_taken_before_a_model_is_loaded() -> None:
    for pcp, dcp, role in ((1, 2, "kv_both"), (2, 1, "kv_producer")):
        config = configuration()
        config.parallel_config.prefill_context_parallel_size = pcp
        config.parallel_config.decode_context_parallel_size = dcp
        config.kv_transfer_config.kv_role = role
        check(config)


@pytest.mark.parametrize(
    "config",
    [
        SimpleNamespace(kv_transfer_config=None),
        configuration("NixlConnector", backends=["UCX"]),
        configuration("OffloadingConnector", spec_name="CPUOffloadingSpec", cpu_bytes_to_use=1),
        configuration("MultiConnector", connectors=[3, {"kv_connector": "AsyncKVConnector"}]),
        configuration(lease={"lease_s": 60}),
        configuration(
            "OffloadingConnector", spec_name="AsyncKVOffloadingSpec", host_bytes=1 << 30, directory="/d", file_bytes=9
        ),
        configuration("DualConnector", asynckv={"lease": {"lease_s": 60}}, nixl={"backends": ["UCX"]}, lend_as="nixl"),
    ],
)
def test_good_configurations_and_those_of_others_are_taken(config: Any) -> None:
    check(config)


def test_vllm_finds_the_plug_in() -> None:
    declared = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]["entry-points"]
    (place,) = declared["vllm.general_plugins"].values()
    assert EntryPoint("asynckv", place, "vllm.general_plugins").load() is watch


def test_reading_options_imports_no_vllm() -> None:
    code = "import sys; from asynckv.integrations.vllm import early, options, scheduler; print('vllm' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_the_room_has_a_door_for_each_connector() -> None:
    import asynckv.integrations.vllm as room

    assert room.__all__ == ["AsyncKVConnector", "DualConnector"]
    with pytest.raises(AttributeError, match="Another"):
        getattr(room, "Another")  # noqa: B009


# -- parts of the offload in vLLM that need no vLLM ------------------------------------------------------------


CUT = Shape(4096, 1, 1, 8)
GIVEN = {"spec_name": "AsyncKVOffloadingSpec", "blocks_per_chunk": 2, "canonical_layout": False}


def test_options_are_fields_of_the_offload_beside_what_the_connector_reads() -> None:
    config = parse(GIVEN | {"host_bytes": 1 << 30, "directory": "/x", "file_bytes": 1 << 40}, "llama", 16)
    assert config == OffloadConfig(
        model="llama", hash_tokens=16, host_bytes=1 << 30, directory="/x", file_bytes=1 << 40
    )
    assert parse(GIVEN | {"host_bytes": 1, "model": "llama@v2"}, "llama", 16).model == "llama@v2"


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "lacks host_bytes"),
        ({"host_byte": 1}, "did you mean 'host_bytes'"),
        ({"surprise": 1}, "has no option 'surprise'"),
        ({"host_bytes": 0}, r"offload.host_bytes is 0; it must be an integer from 1"),
        ({"host_bytes": 1, "directory": "/x"}, "give both, or neither"),
        ({"host_bytes": 1, "policy": "arc"}, "'s3-fifo' or 'lru'"),
        ({"host_bytes": 1, "canonical_layout": True}, "leave it out"),
        *(({"host_bytes": 1, name: 1}, f"{name} is an option of vLLM's own") for name in OF_OTHER_SPECS),
    ],
)
def test_what_is_not_understood_is_refused_by_its_name(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(GIVEN | extra, "llama", 16)


def test_processes_of_an_engine_share_its_memory_until_the_last_has_gone() -> None:
    name = uuid.uuid4().hex
    one, other = Region(name, CUT), Region(name, CUT)
    one.array[7:9] = 42
    assert list(other.array[6:10]) == [0, 42, 42, 0]
    assert one.memory.base % HEAD == 0
    one.path.unlink(missing_ok=True)
    one.close()
    assert not path_of(name).exists()
    assert other.array[7] == 42
    other.close()
    other.close()


def test_a_process_that_cuts_the_memory_otherwise_is_refused() -> None:
    name = uuid.uuid4().hex
    one = Region(name, CUT)
    with pytest.raises(ConfigError, match=r"by block_bytes=8192, .* by block_bytes=4096"):
        Region(name, CUT._replace(block_bytes=8192))
    one.path.unlink(missing_ok=True)
    one.close()


def test_two_engines_of_one_id_do_not_share_their_memory() -> None:
    name = uuid.uuid4().hex
    one, other = Region(name, CUT), Region(name, CUT)
    one.join(0)
    other.join(1)
    assert other.joined() == 2
    with pytest.raises(ConfigError, match=r"as rank 0 of an engine of this id: .* leave engine_id out"):
        other.join(0)
    one.path.unlink(missing_ok=True)
    one.close()
    other.close()


def test_more_than_the_system_has_is_refused_with_the_remedy() -> None:
    with pytest.raises(BackendError, match="lower host_bytes, or give the container more shared memory"):
        Region(uuid.uuid4().hex, CUT._replace(slots=1 << 40))


def test_what_a_killed_process_left_is_swept_away_and_nothing_else() -> None:
    used, left = uuid.uuid4().hex, uuid.uuid4().hex
    kept = Region(used, CUT)
    code = f"import os; from asynckv.integrations.vllm.offload.region import *; Region({left!r}, Shape(4096, 1, 1, 8))"
    subprocess.run([sys.executable, "-c", f"{code}; os._exit(9)"], check=False, env=dict(os.environ), timeout=60)
    assert path_of(left).exists()
    sweep()
    assert not path_of(left).exists()
    assert path_of(used).exists()
    kept.path.unlink(missing_ok=True)
    kept.close()
