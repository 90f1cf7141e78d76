"""Run the whole example: `python docs/examples/two_engines/run.py [DIRECTORY]`; DIRECTORY gets logs and sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import router

HERE = Path(__file__).parent


def main(directory: str = "") -> None:
    """Start both engines, act as the router, and end the engines."""
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
