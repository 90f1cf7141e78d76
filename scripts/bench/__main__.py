"""Benchmarks of parts, one runner for all: `python -m scripts.bench CASE [OPTIONS]`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

CASES = {
    "core": "what the pure core costs: CPU time and instructions",
    "plan": "how long planning takes, and what a stranger's layout costs",
    "engine": "an engine by itself: handshake, idle, memory, peers, logging",
    "log": "engines that log beside such that do not",
    "embed": "the two ways to embed an engine in a worker",
    "loop_stall": "how long bulk reads keep an event loop away",
    "offload": "stores and loads beside the same bytes moved raw",
    "vllm": "AsyncKVConnector beside NixlConnector, inside vLLM",
    "vs_vllm": "asynckv beside the classes of vLLM's NixlConnector, without vLLM around them",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the case that is named; its own --help says what it takes."""
    name, *rest = [*(sys.argv[1:] if arguments is None else arguments), ""]
    if name not in CASES:
        is_asked = name in ("-h", "--help")
        out = sys.stdout if is_asked else sys.stderr
        print(f"{__doc__}\n", *(f"  {case:<12}{what}" for case, what in CASES.items()), sep="\n", file=out)
        return 0 if is_asked else 2
    status: int = importlib.import_module(f"scripts.bench.{name}").main(rest[:-1])
    return status


if __name__ == "__main__":
    sys.exit(main())
