"""The host pool: where it lies, that it is zeroed, that it can be shared, and what is said if it cannot be had."""

from __future__ import annotations

import mmap
import sys
import threading

import numpy as np
import pytest

from asynckv.edges.host_pool import HUGE_PAGE, HostPool
from asynckv.edges.sharing import Shares
from asynckv.errors import BackendError, ConfigError


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("populate", [False, True])
def test_it_is_aligned_zeroed_and_as_long_as_was_asked_for(shared: bool, populate: bool) -> None:
    pool = HostPool(3 * HUGE_PAGE + 1, shared=shared, populate=populate)
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


def test_a_shared_one_can_be_mapped_by_others() -> None:
    pool = HostPool(4 * mmap.PAGESIZE, shared=True)
    assert pool.array is not None
    pool.array[:] = np.arange(pool.num_bytes, dtype=np.uint32).view(np.uint8)[: pool.num_bytes]
    shares = Shares([pool.memory])
    (share,) = shares.shares
    with mmap.mmap(share.fd, share.length, offset=share.offset) as other:
        at = pool.memory.base - share.address
        assert other[at : at + pool.num_bytes] == pool.array.tobytes()
    shares.close()
    pool.close()


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
    with pytest.raises(BackendError, match=f"{1 << 50} bytes of .*memory are not to be had"):
        HostPool(1 << 50)
    with pytest.raises(BackendError, match="not to be had"):
        HostPool(1 << 50, shared=True)


@pytest.mark.slow  # it imports torch
def test_what_cannot_be_pinned_is_said_if_it_was_asked_for() -> None:
    import torch

    if torch.cuda.is_available():
        pool = HostPool(mmap.PAGESIZE)
        assert pool.is_pinned
        pool.close()
        return
    with pytest.raises(BackendError, match=r"cannot be pinned: .*; use pinned=False"):
        HostPool(mmap.PAGESIZE, pinned=True)
    pool = HostPool(mmap.PAGESIZE)
    assert not pool.is_pinned
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
        pool = HostPool(64 << 20, populate=True)
        has_run = ran.is_set()
    finally:
        sys.setswitchinterval(interval)
    thread.join()
    pool.close()
    assert has_run
