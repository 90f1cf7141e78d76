"""The host pool: where it lies, that it is zeroed, and what is said if it cannot be had."""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from asynckv.edges import host_pool
from asynckv.edges.host_pool import HUGE_PAGE, HostPool
from asynckv.errors import BackendError, ConfigError


def test_it_is_aligned_zeroed_and_as_long_as_was_asked_for() -> None:
    pool = HostPool(3 * HUGE_PAGE + 1)
    assert pool.array is not None
    assert pool.memory.base == pool.array.ctypes.data
    assert pool.memory.base % HUGE_PAGE == 0
    assert pool.memory.length == pool.num_bytes == len(pool.array) == 3 * HUGE_PAGE + mmap.PAGESIZE
    assert pool.memory.kind == "cpu"
    assert not pool.array.any()
    pool.array[:] = 7
    pool.close()
    pool.close()
    assert pool.array is None


def test_memory_that_somebody_looks_at_outlives_it() -> None:
    pool = HostPool(mmap.PAGESIZE)
    array = pool.array
    assert array is not None
    pool.close()
    array[:] = 1
    assert array.all()


def test_what_cannot_be_had_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError):
        HostPool(0)
    with pytest.raises(
        BackendError, match=f"{1 << 50} bytes of host memory cannot be .* bytes are available .*; lower host_bytes"
    ):
        HostPool(1 << 50)


class Driver:
    """Stands in for CUDA's driver, of which no host without a GPU has any: notes what is called, in order."""

    def __init__(self, **codes: int) -> None:
        self.codes, self.calls = codes, list[tuple[Any, ...]]()
        self.current = [11]
        """Contexts of this thread; there is one before."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu") or self.codes.get(name) == -1:
            raise AttributeError(name)

        def called(*arguments: Any) -> int:
            plain = [getattr(each, "value", each) for each in arguments if not hasattr(each, "_obj")]
            self.calls.append((name, *plain))
            if name == "cuDeviceGet":
                arguments[0]._obj.value = 100 + arguments[1]
            elif name == "cuDevicePrimaryCtxRetain":
                arguments[0]._obj.value = 0x7000
            elif name == "cuCtxPushCurrent_v2":
                self.current.append(arguments[0].value)
            elif name == "cuCtxPopCurrent_v2":
                arguments[0]._obj.value = self.current.pop()
            elif name == "cuMemHostRegister_v2":
                assert self.current[-1] == 0x7000
            elif name == "cuGetErrorString":
                arguments[1]._obj.value = b"out of memory"
            return self.codes.get(name, 0)

        return called


def with_driver(monkeypatch: pytest.MonkeyPatch, **codes: int) -> Driver:
    driver = Driver(**codes)
    monkeypatch.setattr(host_pool, "load_driver", lambda: driver)
    return driver


def test_it_is_pinned_for_the_gpu_that_has_the_blocks_and_given_back_before_its_memory_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = with_driver(monkeypatch)
    pool = HostPool(2 * mmap.PAGESIZE, device=3)
    assert pool.how == "pinned for GPU 3"
    assert [call[0] for call in driver.calls] == [
        "cuInit",
        "cuDeviceGet",
        "cuDevicePrimaryCtxRetain",
        "cuCtxPushCurrent_v2",
        "cuMemHostRegister_v2",
        "cuCtxPopCurrent_v2",
    ]
    assert driver.calls[1] == ("cuDeviceGet", 3)
    assert driver.calls[4] == ("cuMemHostRegister_v2", pool.memory.base, pool.num_bytes, 0x03)
    driver.calls.clear()
    base = pool.memory.base
    monkeypatch.setattr(driver, "cuMemHostUnregister", lambda at: driver.calls.append((at.value, pool.array)), False)
    pool.close()
    pool.close()
    names = ["cuCtxPushCurrent_v2", base, "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2"]
    assert [call[0] for call in driver.calls] == names
    assert driver.calls[1][1] is not None
    assert driver.calls[-1][1] == 103
    assert driver.current == [11]


@pytest.mark.parametrize(
    ("name", "code", "said", "is_left"),
    [
        ("cuMemHostRegister_v2", 2, r"cuMemHostRegister_v2: out of memory \(error 2\)", True),
        ("cuDeviceGet", 101, r"cuDeviceGet: .* \(error 101\)", False),
        ("cuMemHostRegister_v2", -1, "has no cuMemHostRegister_v2; it is too old", True),
    ],
)
def test_memory_that_cannot_be_pinned_serves_as_well_and_says_why(
    name: str, code: int, said: str, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = with_driver(monkeypatch, **{name: code})
    pool = HostPool(mmap.PAGESIZE, device=0)
    assert re.match(f"not pinned for GPU 0, so copies are slower: .*{said}", pool.how)
    assert (driver.calls[-1][0] == "cuDevicePrimaryCtxRelease_v2") is is_left
    driver.calls.clear()
    pool.close()
    assert driver.calls == []
    assert driver.current == [11]


def test_no_driver_is_asked_without_a_gpu_and_none_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL

    def refuse(name: str | None, **options: Any) -> Any:
        if name is None:
            return load(name, **options)
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    assert HostPool(mmap.PAGESIZE).how == ""
    pool = HostPool(mmap.PAGESIZE, device=1)
    assert "there is no CUDA driver: libcuda.so.1: cannot open shared object file" in pool.how
    pool.close()


def test_other_threads_run_while_it_is_taken_from_the_system() -> None:
    """It takes seconds, and an engine's loop has promises to keep meanwhile."""
    go, ran = threading.Event(), threading.Event()

    def follow() -> None:
        go.wait()
        ran.set()

    thread = threading.Thread(target=follow)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # others run when this thread lets them, and not before
    try:
        go.set()
        pool = HostPool(64 << 20)
        has_run = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    pool.close()
    assert has_run
