"""What listens at a port: whether anything does, and by its greeting whether it speaks ZMQ, with keys or without."""

from __future__ import annotations

import errno
import socket
from typing import NamedTuple

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
"""As far as the version (ZMTP 3, RFC 23): whoever hears it answers with its own mechanism, before it has seen ours."""

MECHANISM_END = 32


class Greeted(NamedTuple):
    """What came of a look: whether something listens, and what ZMQ's greeting offers, or what was said instead."""

    connected: bool
    mechanism: str = ""
    error: str = ""
    errno: int = 0


def look_at_port(host: str, port: int, connect_s: float, greet_s: float) -> Greeted:
    """Connect to a port, greet, and hear what greets back."""
    connected, waits_s, data = False, connect_s, b""
    try:
        with socket.create_connection((host, port), connect_s) as there:
            connected, waits_s = True, greet_s
            there.settimeout(greet_s)
            there.sendall(GREETING)
            while len(data) < MECHANISM_END and (more := there.recv(64 - len(data))):
                data += more
    except TimeoutError:
        return Greeted(connected, "", f"no answer within {waits_s:g} s", errno.ETIMEDOUT)
    except OSError as exc:
        return Greeted(connected, "", exc.strerror or str(exc), exc.errno or 0)
    if len(data) >= MECHANISM_END and data[0] == 0xFF and data[9] == 0x7F:
        return Greeted(True, data[12:MECHANISM_END].rstrip(b"\0").decode("ascii", "replace"))
    return Greeted(True, "", f"it said {data[:MECHANISM_END]!r}" if data else "it closed the connection")
