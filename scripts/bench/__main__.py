"""Run a benchmark of one part: `python -m scripts.bench CASE [OPTIONS]`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

CASES = {
    "plan": "time of planning, and cost of an unknown peer's layout",
    "engine": "one engine: handshake, idle, memory, peers, logging",
    "alone": "one small request at a time, beside bare ZMQ and NIXL",
    "embed": "the two ways to embed an engine in a worker",
    "recall": "time of a recall, and latency of pulls that may be recalled",
    "follow": "time from a loan to the result of a reader that followed its ticket, and CPU of readers that wait",
    "look": "cost of a second look, and what it finds",
    "router": "`asynckv proxy` compared with a plain proxy, CPU and bursts",
    "offload": "stores and loads, compared with raw copies of the same bytes",
    "legs": "both legs of a request at once compared with one after the other, behind vLLM's API server",
    "vllm": "AsyncKVConnector compared with NixlConnector, inside vLLM",
    "vs_vllm": "asynckv compared with the classes of vLLM's NixlConnector, outside vLLM",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the named case; its own --help has its options."""
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
