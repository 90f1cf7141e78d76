"""`python -m asynckv` is `asynckv`: what comes before the command line is imported, and after it has ended.

Meanwhile nothing runs that Ctrl-C would have to end in order: it is one line, and the process is gone.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line."""
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # and not started to ignore it
    if heeds:
        sys.unraisablehook = _unraisable
        signal.signal(signal.SIGINT, _interrupted)
    from asynckv.tools import cli

    status = 130
    try:
        if heeds:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        status = cli.run()
    except KeyboardInterrupt:  # one more, while the first was told
        pass
    finally:
        if heeds:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interpreter that ends takes it for a kill, or an error
    sys.exit(status)


def _interrupted(*_: object) -> None:
    os.write(2, b"asynckv: interrupted\n")
    os._exit(130)


def _unraisable(found: sys.UnraisableHookArgs) -> None:
    """Heed a Ctrl-C that came where Python can raise nothing, such as in a callback of the import system."""
    if issubclass(found.exc_type, KeyboardInterrupt):
        _interrupted()
    sys.__unraisablehook__(found)


if __name__ == "__main__":
    main()
