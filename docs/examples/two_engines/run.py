"""All of it with one command: `python docs/examples/two_engines/run.py [DIRECTORY]`; logs and sockets go there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import router

HERE = Path(__file__).parent


def main(directory: str = "") -> None:
    """Start both engines, be the router, and end them."""
    commands = [[sys.executable, str(HERE / f"{name}.py"), "--dir", directory] for name in ("prefill", "decode")]
    engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    try:
        ready = [engine.stdout.readline() for engine in engines if engine.stdout]
        print(*ready, sep="", end="")
        router.main(*(line.split()[-1] for line in ready))
    finally:
        for engine in engines:
            engine.terminate()
        for engine in engines:
            engine.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
