"""Code that the examples share: a worker's KV tensors, a step of its model, and processes with pipes."""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from asynckv import Registration, register_tensors, shared_tensor

if TYPE_CHECKING:
    import torch


def memory(seed: int) -> tuple[dict[str, torch.Tensor], Registration]:
    """Make KV tensors of two layers: keys and values, 64 blocks of 16 tokens, 8 heads of 128."""
    import torch

    torch.manual_seed(seed)
    shape = (2, 64, 16, 8, 128)
    tensors = {f"layers.{i}": shared_tensor(shape, torch.bfloat16).normal_() for i in range(2)}
    return tensors, register_tensors(
        tensors,
        order=("kv", "block", "token", "head", "dim"),
        block_size=16,
        num_blocks=64,
        heads=(0, 8),
        num_heads=8,
        model="example",
    )


def forward() -> None:
    """Compute for a few milliseconds, mostly outside Python, as a step of a model does."""
    import torch

    x = torch.ones(512, 512)
    for _ in range(4):
        x = x @ x / 512


def content(tensors: dict[str, torch.Tensor], blocks: list[int]) -> list[float]:
    """Return a sum of the blocks' contents per layer."""
    return [float(tensor[:, blocks].double().sum()) for tensor in tensors.values()]


def overwrite(tensors: dict[str, torch.Tensor], blocks: list[int]) -> None:
    """Reuse blocks for other contents."""
    for tensor in tensors.values():
        tensor[:, blocks] = -1.0


def run(work: Callable[..., Any], *args: Any) -> None:
    """Run a worker's function, which may be asynchronous."""
    if inspect.isawaitable(done := work(*args)):
        asyncio.run(_awaited(done))


async def _awaited(work: Awaitable[None]) -> None:
    await work


def start(work: Callable[..., Any], *args: Any) -> Connection:
    """Start a process, and return this end of the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    context.Process(target=run, args=(work, *args, its), daemon=True).start()  # else Ctrl-C waits for its `recv`
    return ours


def end(worker: Connection, blocks: list[int]) -> list[float]:
    """End a worker, and return the contents of its blocks."""
    worker.send(None)
    worker.send(blocks)
    found: list[float] = worker.recv()
    return found
