"""Offload: store KV blocks in host memory and files, and load them back into other blocks."""

import asyncio
import tempfile

import kv

from asynckv import Engine, EngineConfig
from asynckv.offload import Offload, OffloadConfig


async def worker(directory: str) -> None:
    tensors, registration = kv.memory(1)
    config = OffloadConfig(
        model="example-7b", hash_tokens=16, host_bytes=64 << 20, directory=directory, file_bytes=256 << 20
    )
    hashes = ["a1", "b2", "c3", "d4"]  # one per 16 tokens of a prompt; each covers all tokens before it
    async with Engine(EngineConfig(engine_id="worker"), registration) as engine, Offload(config, engine) as offload:
        before = kv.content(tensors, [3, 4, 9])
        stored = await offload.store("r1", [(0, [3, 4, 9])], hashes[:3])
        kv.overwrite(tensors, [3, 4, 9])  # the engine may reuse them

        found = offload.lookup(hashes)  # another request with the same first 48 tokens
        loaded = await offload.load("r2", [(0, [7, 5, 6, None])], hashes, num_tokens=found.tokens)
        assert kv.content(tensors, [7, 5, 6]) == before
        print(stored.num_bytes, "bytes,", loaded.num_tokens, "tokens")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(worker(directory))
