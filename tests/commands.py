"""Commands that tests run: the command line within their own process, and other interpreters."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from asynckv.tools import cli


def python(*argv: str, timeout_s: float = 50, **env: str) -> subprocess.CompletedProcess[str]:
    """Run another interpreter to its end, within the time of a test."""
    command = [sys.executable, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, env=os.environ | env)


def asynckv(*argv: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "asynckv", *argv)


class Command:
    """Runs `asynckv`. Tests have it as the fixture `command`.

    Attributes:
        patch: Undone after the test.
        streams: What the command writes.
    """

    def __init__(self, patch: pytest.MonkeyPatch, streams: pytest.CaptureFixture[str]) -> None:
        self.patch, self.streams = patch, streams

    def run(self, *argv: object) -> tuple[int, str, str]:
        """Return the exit status, and what stdout and stderr got."""
        self.patch.setattr(sys, "argv", ["asynckv", *map(str, argv)])
        with pytest.raises(SystemExit) as ended:
            sys.exit(cli.run())
        out, err = self.streams.readouterr()
        return int(ended.value.code or 0), out, err

    def complaint(self, *argv: object) -> str:
        """Expect exit status 2, and return the one line on stderr."""
        status, out, err = self.run(*argv)
        assert (status, out) == (2, ""), (status, out, err)
        assert err.startswith("asynckv: "), err
        assert err.count("\n") == 1, err
        return err
