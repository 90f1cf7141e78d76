"""What asynckv's spec for vLLM's `OffloadingConnector` has that needs no vLLM: its options, and its host memory."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from typing import Any

import pytest

from asynckv.config import OffloadConfig
from asynckv.errors import BackendError, ConfigError
from asynckv.integrations.vllm.offload.options import OF_OTHER_SPECS, parse
from asynckv.integrations.vllm.offload.region import HEAD, Region, Shape, path_of, sweep

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
    one.unlink()
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
    one.unlink()
    one.close()


def test_two_engines_of_one_id_do_not_share_their_memory() -> None:
    name = uuid.uuid4().hex
    one, other = Region(name, CUT), Region(name, CUT)
    one.join(0)
    other.join(1)
    assert other.joined() == 2
    with pytest.raises(ConfigError, match=r"as rank 0 of an engine of this id: .* leave engine_id out"):
        other.join(0)
    one.unlink()
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
    kept.unlink()
    kept.close()
