"""The command line, run in the process of a test."""

from __future__ import annotations

import sys

import pytest

from asynckv.tools import cli


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
