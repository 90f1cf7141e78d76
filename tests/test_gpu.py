"""GPU memory: lent after the event that wrote it, read in order. Skipped where there is no GPU."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

import asynckv
from asynckv.config import PullConfig
from asynckv.edges.nic.agent import Agent
from asynckv.edges.torch import CudaMirror, cuda_bytes, first_difference_of_tensors, stream_event, synchronize
from asynckv.errors import ConfigError
from asynckv.geometry.layout import Memory
from tests.commands import python


class ThreadEvent:
    """The methods of `torch.cuda.Event`, set by hand."""

    def __init__(self, is_done: bool) -> None:
        self._done = threading.Event()
        self.waits = 0
        if is_done:
            self._done.set()

    def query(self) -> bool:
        return self._done.is_set()

    def record(self) -> None:
        self._done.set()

    def synchronize(self) -> None:
        self.waits += 1
        self._done.wait(10)


async def test_waiting_for_an_event_leaves_the_loop_free() -> None:
    first, second = ThreadEvent(True), ThreadEvent(False)
    waiting = asyncio.create_task(synchronize(first, second))
    turned = asyncio.Event()
    asyncio.get_running_loop().call_soon(turned.set)
    await asyncio.wait_for(turned.wait(), 5)
    assert not waiting.done()
    second.record()
    await asyncio.wait_for(waiting, 5)
    assert (first.waits, second.waits) == (0, 1)


async def test_whoever_waits_for_an_event_may_be_cancelled() -> None:
    event = ThreadEvent(False)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(synchronize(event), 0.01)
    event.record()


def test_without_a_gpu_the_remedy_is_named() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="finds no CUDA device here; use --memory host"):
        CudaMirror([4096])


@pytest.fixture
def torch_cuda() -> Any:
    import torch

    if not torch.cuda.is_available():
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    return torch


@pytest.mark.gpu
def test_a_mirror_brings_bytes_there_and_back(torch_cuda: Any) -> None:
    mirror = CudaMirror([4096, 512])
    mirror.arrays[0][:] = 7
    mirror.upload().synchronize()
    mirror.arrays[0][:] = 0
    mirror.download()
    assert (mirror.arrays[0] == 7).all()
    assert (mirror.arrays[1] == 0).all()


@pytest.mark.gpu
def test_gpu_tensors_are_registered_as_such(torch_cuda: Any) -> None:
    tensor = torch_cuda.zeros(2, 8, 4, 2, 16, dtype=torch_cuda.bfloat16, device="cuda")
    (memory,) = registered(tensor).layout.memories
    assert (memory.kind, memory.device, memory.base) == ("cuda", tensor.device.index, tensor.data_ptr())


def registered(tensor: Any) -> Any:
    """Register one layer."""
    _, num_blocks, block_size, num_heads, _ = tensor.shape
    return asynckv.register_tensors(
        {"layers.0": tensor},
        order=("kv", "block", "token", "head", "dim"),
        block_size=block_size,
        num_blocks=num_blocks,
        heads=(0, num_heads),
        num_heads=num_heads,
    )


@pytest.mark.gpu
@pytest.mark.nixl
def test_a_lend_after_the_event_hands_over_what_the_kernels_wrote(torch_cuda: Any) -> None:
    async def run() -> None:
        tensors, engines = [], []
        for engine_id in ("prefill", "decode"):
            tensor = torch_cuda.zeros(2, 64, 16, 8, 128, dtype=torch_cuda.float32, device="cuda")
            tensors.append(tensor)
            engines.append(asynckv.Engine(asynckv.EngineConfig(engine_id=engine_id), registered(tensor)))
        prefill, decode = engines
        async with prefill, decode:
            group = asynckv.PrefillRanks("prefill", [prefill.endpoint])
            for turn in range(1, 21):
                blocks = [(0, list(range(64)))]
                params = group.make_params(f"prefill-{turn}", blocks, 1024)
                pulled = asyncio.create_task(decode.pull(f"decode-{turn}", blocks, params))
                tensors[0].fill_(-turn)
                for _ in range(50):  # keeps the stream busy behind the call
                    tensors[0].mul_(1.0)
                tensors[0].mul_(-1.0)
                await synchronize(stream_event())
                lent = prefill.lend(params)
                await pulled
                # The first kernel after the pull sees what was read.
                assert bool((tensors[1] == turn).all())
                await lent.wait_released()

    asyncio.run(run())


@pytest.mark.gpu
@pytest.mark.nixl
def test_a_benchmark_between_gpu_pools_verifies_every_byte(torch_cuda: Any) -> None:
    argv = ["--layers", "2", "--prompt-tokens", "64:300", "--requests", "30", "--memory", "cuda"]
    done = python("-m", "asynckv", "bench", *argv, "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["bytes"]["verified"] == report["bytes"]["wanted"] > 0
    assert report["bytes"]["wrong"] == 0


@pytest.mark.gpu
@pytest.mark.nixl
@pytest.mark.parametrize("size", [1 << 20, "all"])
def test_one_byte_that_changes_between_two_reads_of_gpu_memory_is_found(
    torch_cuda: Any, size: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull, changes, honest = PullConfig(second_look=1.0, second_look_bytes=size), list[Any](), Agent._post_look

    def post(self: Agent, *args: Any) -> Any:
        while changes:
            changes.pop()()
        return honest(self, *args)

    monkeypatch.setattr(Agent, "_post_look", post)

    async def run() -> None:
        tensors, engines = [], []
        for engine_id in ("prefill", "decode"):
            # NaNs among them, because bytes are compared.
            tensor = torch_cuda.full((2, 64, 16, 8, 128), float("nan"), dtype=torch_cuda.float32, device="cuda")
            tensors.append(tensor)
            engines.append(asynckv.Engine(asynckv.EngineConfig(engine_id=engine_id, pull=pull), registered(tensor)))
        prefill, decode = engines
        tensors[0][:, ::2] = -0.0
        torch_cuda.cuda.synchronize()

        def change() -> None:
            tensors[0][1, 63, 15, 7, 127] = 0.0  # the very last element, whose sign alone changes
            torch_cuda.cuda.synchronize()

        async with prefill, decode:
            group = asynckv.PrefillRanks("prefill", [prefill.endpoint])
            for turn in range(3):
                blocks = [(0, list(range(64)))]
                params = group.make_params(f"prefill-{turn}", blocks, 1024, written=True)
                tensors[0][1, 63, 15, 7, 127] = -0.0
                torch_cuda.cuda.synchronize()
                lent = prefill.lend(params)
                if turn == 1:
                    changes.append(change)
                    with pytest.raises(asynckv.BytesDiffer, match=r"part 'v' of layer 'layers.0', tokens 1008 to 1023"):
                        await decode.pull(f"decode-{turn}", blocks, params)
                else:
                    await decode.pull(f"decode-{turn}", blocks, params)
                await lent.wait_released()

    asyncio.run(run())


@pytest.mark.gpu
def test_registered_gpu_memory_is_seen_as_its_bytes(torch_cuda: Any) -> None:
    tensor = torch_cuda.arange(1000, dtype=torch_cuda.int32, device="cuda")
    seen = cuda_bytes(Memory(tensor.data_ptr(), 4000, "cuda", tensor.device.index))
    assert seen.data_ptr() == tensor.data_ptr()
    assert first_difference_of_tensors([(seen, tensor.view(torch_cuda.uint8))]) is None
    other = tensor.clone()
    other[7] += 1
    found = first_difference_of_tensors([(seen[:28], seen[:28]), (seen[28:], other.view(torch_cuda.uint8)[28:])])
    assert found is not None
    assert (found.piece, found.here[0], found.there[0]) == (1, 7, 8)
