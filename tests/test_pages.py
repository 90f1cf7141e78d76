"""Pages of host memory: what room there is for them, who allocates them and when, and what is said without room."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import re
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asynckv import BackendError, NixlConfig, shared_memory, shared_tensor
from asynckv.arguments import MAX_INTEGER
from asynckv.edges import pages
from asynckv.edges.host_pool import HostPool
from asynckv.edges.nic import packer, staging
from asynckv.edges.nic.packer import Packer
from asynckv.edges.nic.staging import bytes_at
from asynckv.edges.pages import memory_available, populate
from asynckv.edges.torch import shared_zeros
from asynckv.geometry.layout import Memory
from asynckv.geometry.staging import SLOT_BYTES
from asynckv.integrations.vllm.offload import region
from scripts.bench.versus.workload import minor_faults
from tests.engines import until
from tests.test_nixl_edge import Side, link
from tests.test_packer import Owned, gathered
from tests.test_staged_reads import EVEN, check_read, rows

MB = 1 << 20
MEMINFO = "MemTotal: 99 kB\nMemFree:  1 kB\nMemAvailable:  102400 kB\nSwapFree: 7 kB\n"  # 100 MiB
STAT = f"anon 5\ninactive_file {2 * MB}\nactive_file {MB}\nactive_file_x 9\n"
STAT_1 = f"inactive_file 7\ntotal_inactive_file {2 * MB}\ntotal_active_file {MB}\n"


def resident(address: int, num_bytes: int) -> int:
    """Return the bytes of a range whose pages are there, as the kernel says."""
    there = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), there) == 0
    return sum(each & 1 for each in there) * mmap.PAGESIZE


def place(folder: Path, meminfo: str | None, cgroup: str | None, files: dict[str, str]) -> tuple[Path, Path]:
    texts = {"proc/meminfo": meminfo, "proc/self/cgroup": cgroup}
    texts |= {f"cgroups/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    return folder / "proc", folder / "cgroups"


NESTED = {
    "a/b/memory.max": "max\n",
    "a/b/memory.current": f"{7 * MB}\n",
    "a/memory.max": f"{50 * MB}\n",
    "a/memory.current": f"{20 * MB}\n",
    "a/memory.stat": STAT,
    "memory.max": f"{90 * MB}",
    "memory.current": "0",
}


@pytest.mark.parametrize(
    ("meminfo", "cgroup", "files", "have", "limit"),
    [
        pytest.param(MEMINFO, "0::/\n", {}, 100 * MB, "MemAvailable of .*/proc/meminfo", id="host"),
        pytest.param(MEMINFO, "0::/a/b\n", NESTED, 33 * MB, ".*/cgroups/a/memory.max", id="ancestor"),
        pytest.param(
            MEMINFO, "0::/a/b\n", NESTED | {"a/b/memory.max": f"{9 * MB}"}, 2 * MB, ".*/a/b/memory.max", id="own"
        ),
        pytest.param(
            MEMINFO,
            "0::/not/here\n",
            {"memory.max": f"{9 * MB}", "memory.current": f"{MB}"},
            8 * MB,
            ".*/cgroups/memory.max",
            id="container without a namespace",
        ),
        pytest.param(
            MEMINFO,
            "9:name=systemd:/x\n4:hugetlb,memory:/x/y\n1:cpu:/\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": f"{30 * MB}\n",
                "memory/x/memory.usage_in_bytes": f"{10 * MB}\n",
                "memory/x/memory.stat": STAT_1,
                "memory/x/y/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/x/y/memory.usage_in_bytes": f"{10 * MB}\n",
            },
            23 * MB,
            ".*/memory/x/memory.limit_in_bytes",
            id="version 1",
        ),
        pytest.param(
            MEMINFO, "0::/\n", {"memory.max": f"{MB}", "memory.current": f"{2 * MB}"}, 0, ".*", id="over its limit"
        ),
        pytest.param(
            MEMINFO,
            "0::/\n",
            {"memory.max": "0", "memory.stat": f"inactive_file {MB}"},
            0,
            ".*",
            id="more back than used",
        ),
        pytest.param(None, None, {}, MAX_INTEGER, "no known limit", id="nothing to read"),
        pytest.param(
            "MemAvailable: lots kB\nMemAvailable\xff\n",
            "junk\n0::\n0:memory\n:::\n0::/\0/../..\n0::/../..\n0::/a\n",
            {"a/memory.max": "9" * 5000, "memory.max": "-1", "a/memory.current": "x", "a/memory.stat/x": ""},
            MAX_INTEGER,
            "no known limit",
            id="junk",
        ),
    ],
)
def test_the_room_is_the_least_of_the_host_and_all_groups(
    tmp_path: Path, meminfo: str | None, cgroup: str | None, files: dict[str, str], have: int, limit: str
) -> None:
    found = memory_available(*place(tmp_path, meminfo, cgroup, files))
    assert found[0] == have
    assert re.fullmatch(limit, found[1])


def test_this_host_says_how_much_there_is() -> None:
    have, limit = memory_available()
    assert 0 < have < 1 << 50
    assert limit.endswith(("/proc/meminfo", "memory.max", "memory.limit_in_bytes"))


@pytest.fixture
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """A control group with room for 1 MiB."""
    groups = place(tmp_path, MEMINFO, "0::/\n", {"memory.max": f"{3 * MB}", "memory.current": f"{2 * MB}"})
    small = partial(memory_available, *groups)
    monkeypatch.setattr(pages, "memory_available", small)
    monkeypatch.setattr(region, "memory_available", small)
    return MB


def test_what_has_no_room_is_refused_with_the_numbers_the_limit_and_a_remedy(narrow: int, tmp_path: Path) -> None:
    said = (
        rf"{2 * MB} bytes of \w+ memory cannot be allocated, because {narrow} bytes are available \(.*memory\.max\); "
    )
    for allocate in (
        partial(shared_memory, 2 * MB),
        partial(shared_tensor, (2, MB), torch.int8),
        partial(HostPool, 2 * MB),
    ):
        with pytest.raises(BackendError, match=said):
            allocate()
    with pytest.raises(BackendError, match=f"{said}allocate fewer .*num_gpu_blocks_override.*, or raise that limit"):
        shared_memory(2 * MB)
    with shared_zeros(), pytest.raises(BackendError, match=said):
        torch.zeros((2, MB), dtype=torch.int8)
    HostPool(MB).close()
    assert shared_tensor((MB,), torch.int8).nbytes == MB


def test_a_region_without_room_is_refused_and_leaves_no_file(
    narrow: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(region, "FOLDER", folder)
    with pytest.raises(
        BackendError, match=rf"{2 * MB} bytes .* \({narrow} bytes are available: .*memory\.max\).*; lower"
    ):
        region.Region("e", region.Shape(MB, 1, 1, 2))
    assert not list(folder.iterdir())
    one = region.Region("e", region.Shape(MB, 1, 1, 1))
    other = region.Region("e", region.Shape(MB, 1, 1, 1))  # the pages are there, so it needs no room
    one.close()
    other.close()


def test_every_process_of_an_engine_has_all_pages_of_the_region(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region, "FOLDER", tmp_path)
    one, other = (region.Region("e", region.Shape(MB, 1, 1, 8)) for _ in range(2))
    before = minor_faults()
    one.array[:: mmap.PAGESIZE] = other.array[1 :: mmap.PAGESIZE] = 1
    assert minor_faults() - before < 300  # 2,048 without
    one.close()
    other.close()


def test_where_memory_cannot_be_shared_zeros_are_allocated_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError("no memfd in this sandbox")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with shared_zeros():
        assert not torch.zeros(4096, dtype=torch.int8).any()
    with pytest.raises(BackendError, match="cannot be allocated: no memfd"):
        shared_tensor((1,))


@pytest.mark.parametrize("advice", [pages.POPULATE_WRITE, 999], ids=["this kernel", "before 5.14"])
def test_every_page_is_there_and_no_byte_has_changed(monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr(pages, "POPULATE_WRITE", advice)
    monkeypatch.setattr(pages, "PIECE", 16 * mmap.PAGESIZE)
    size = 40 * mmap.PAGESIZE + 17
    for memory in (shared_memory(size), mmap.mmap(-1, size)):
        array = np.frombuffer(memory, np.uint8)
        array[5 * mmap.PAGESIZE], array[-1] = 7, 9
        populate(array, "memory")
        assert resident(array.ctypes.data, size) == 41 * mmap.PAGESIZE
        assert np.flatnonzero(array).tolist() == [5 * mmap.PAGESIZE, size - 1]
    pool = HostPool(size)
    assert resident(pool.memory.base, pool.num_bytes) == pool.num_bytes
    pool.close()


def test_what_the_kernel_refuses_is_an_error() -> None:
    with pytest.raises(BackendError, match="4096 bytes of nothing cannot be allocated: Cannot allocate memory; less"):
        populate(bytes_at(Memory(mmap.PAGESIZE, 4096)), "nothing", "less")


def test_room_that_another_process_takes_meanwhile_is_missed_at_the_next_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([(3 * MB, "x"), (3 * MB, "x"), (MB, "x")])
    monkeypatch.setattr(pages, "memory_available", lambda: next(left))
    monkeypatch.setattr(pages, "PIECE", MB)
    with pytest.raises(BackendError, match=f"{2 * MB} bytes of shared memory .* {MB} bytes are available"):
        shared_memory(3 * MB)


def test_one_line_says_size_and_seconds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asynckv")
    shared_tensor((4096,), torch.float32)
    with shared_zeros():
        for _ in range(3):
            torch.zeros(4096, dtype=torch.int8)
    with shared_zeros():
        pass
    said = [record.getMessage() for record in caplog.records]
    assert [re.sub(r"seconds=\d+\.\d+", "seconds=S", line) for line in said] == [
        f"memory_allocated bytes={4 * 4096} seconds=S",
        f"memory_allocated bytes={3 * 4096} seconds=S",
    ]


# -- staging memory and packed copies ------------------------------------------------------------------------------


def note_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the threads that populate from now on."""
    names: list[str] = []

    def noted(*args: Any, **options: Any) -> None:
        names.append(threading.current_thread().name)
        populate(*args, **options)

    monkeypatch.setattr(staging, "populate", noted)
    monkeypatch.setattr(packer, "populate", noted)
    return names


@pytest.mark.nixl
async def test_staging_memory_of_all_threads_is_there_after_the_first_staged_read(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = note_threads(monkeypatch)
    reader, owner = await link(sides, NixlConfig(posting_threads=2, staging_bytes=8 * SLOT_BYTES))
    areas = [poster.agent.stage.memory for poster in reader.plane._posters if poster.agent.stage is not None]
    assert len(areas) == 2
    before = [resident(area.base, area.length) for area in areas]
    assert max(before) <= SLOT_BYTES  # the measurement of costs used a slot
    await check_read(reader, owner, 1, *rows(0, EVEN, 1))
    assert [resident(area.base, area.length) for area in areas] == [4 * SLOT_BYTES] * 2
    await check_read(reader, owner, 2, *rows(0, EVEN, 2))
    assert set(names) <= {poster.name for poster in reader.plane._posters}
    assert names


async def test_memory_for_packed_copies_is_there_from_the_first_one_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names, owned = note_threads(monkeypatch), Owned(5)
    made = Packer(owned.memories, 3, asyncio.get_running_loop(), lambda: None)
    memory = made.packing.memory
    assert resident(memory.base, memory.length) == 0
    for slot in (0, 1):
        made.pack(slot, gathered(1))
    await until(lambda: len(made.made) == 2)
    assert resident(memory.base, memory.length) == memory.length
    assert names == [made.name]
    made.close()


@pytest.mark.nixl
async def test_without_room_reads_are_staged_and_copies_packed_all_the_same(
    sides: list[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, owner = await link(sides, NixlConfig(posting_threads=1, staging_bytes=4 * SLOT_BYTES))
    owned = Owned(5)
    made = Packer(owned.memories, 3, asyncio.get_running_loop(), lambda: None)
    monkeypatch.setattr(pages, "memory_available", lambda: (0, "nothing is left"))
    await check_read(reader, owner, 1, *rows(0, EVEN, 1))
    made.pack(0, gathered(1))
    await until(lambda: made.made)
    assert not made.made[0].cause
    made.close()
