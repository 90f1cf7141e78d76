"""A worker process. The first line sets its environment, so modules that read the environment are loaded later."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
import warnings
from pathlib import Path

import msgspec

from asynckv.errors import ConfigError
from asynckv.tools.bench import protocol as p
from asynckv.tools.bench import ucx
from asynckv.tools.bench.processes import end_with_driver
from asynckv.version import VERSION


def main() -> None:
    """Read commands from stdin and answer on stdout, until the driver says stop or is gone."""
    # Libraries may print to stdout too, so from here on it is stderr.
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    with open(0, "rb", buffering=0, closefd=False) as lines:
        line = lines.readline()
    if not line:
        return
    end_with_driver()
    try:
        setup = msgspec.json.decode(line, type=p.Setup)
    except p.MALFORMED as exc:
        raise ConfigError(
            f"stdin is not from a driver of asynckv {VERSION} ({exc}); start a worker by asynckv bench --remote "
            f"COMMAND of the same version"
        ) from exc
    if setup.version != VERSION:
        text = f"the worker is asynckv {VERSION}, but its driver is {setup.version}; install the same version on both"
        os.write(stdout, p.encode(p.Failed(text, True)))
        return
    for name, value in setup.env.items():
        os.environ.setdefault(name, value)
    if setup.options.json == "-":
        warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(prefix="asynckv-bench-") as folder:
        if setup.role == "decode":
            os.environ |= ucx.environment(Path(folder))
        from asynckv.tools.bench import rank

        work = rank.run(setup, stdout, Path(folder))
        if importlib.util.find_spec("uvloop") is not None:
            import uvloop

            uvloop.run(work)
        else:
            asyncio.run(work)
