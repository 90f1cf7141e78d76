"""A vLLM that lacks all that the connector can do without: `python -m tests.vllm.without`, in a process of its own.

The names are taken out of vLLM's own modules while the connector looks them up, and put back, because vLLM uses them
too. Then both halves work as they do otherwise: a prompt is lent and read, and every byte compared.
"""

from __future__ import annotations

import importlib
import logging
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import vllm

from asynckv.integrations.vllm import compat

ASKED_FOR = {"SupportsHMA"}
"""A class that this vLLM looks for in the connector; one that lacks it does not."""

MODULES = {name: importlib.import_module(name) for name in compat.NAMES}
TAKEN = [
    (MODULES[compat._MODULES[name]], each) for name in {*compat.STAND_INS} - ASKED_FOR for each in (name, "__getattr__")
]


def main() -> None:
    """Say what is logged, and which blocks have arrived."""
    logging.basicConfig(format="%(name)s: %(message)s")
    kept = [(module, name, vars(module).pop(name)) for module, name in TAKEN if name in vars(module)]
    assert compat.lacking() == [name for name in compat.STAND_INS if name not in ASKED_FOR]
    importlib.import_module("asynckv.integrations.vllm.connector")
    for module, name, found in kept:
        setattr(module, name, found)
    vllm.__version__ = "0.99.0"
    schedulers()
    workers()


def schedulers() -> None:
    """A prompt is lent, read, and forgotten."""
    from asynckv.embed.orders import Pull
    from tests.vllm.schedulers import Side
    from tests.vllm.test_scheduler import brought, is_clean, prompt_of

    side, prompt = Side(), prompt_of(100)
    side.add("a", prompt, brought(prompt), 1)
    assert side.step().only(Pull).num_tokens == 100
    side.step(loaded=["a"])
    for _ in range(3):
        side.step()
    assert is_clean(side)
    print("read by a scheduler")


def workers() -> None:
    """Blocks are read by a worker."""
    import torch

    from asynckv.integrations.vllm.options import Options
    from tests.vllm.test_worker import LAYERS, Side

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def made(name: str) -> Any:
            return Side(name, Path(folder) / "model", stack, Options(), [list(LAYERS)], LAYERS).worker

        prefill, decode = made("prefill"), made("decode")
        for tensor in prefill.tensors.values():
            tensor.copy_(torch.randn(tensor.shape))
        decode.load([(0, [2, 1])], prefill.lend("p", [7, 3]))
        prefill.until(lambda: prefill.sent == ["p"])
        for name, tensor in decode.tensors.items():
            assert torch.equal(tensor[[2, 1]], prefill.tensors[name][[7, 3]])
    print("read by a worker")


if __name__ == "__main__":
    main()
