"""The data plane's own process: maps the engine's memory at the same addresses, then runs `NixlPlane` for it.

`python -m asynckv.edges.survivor.main SOCKET`. The list of memory comes first, as JSON. It is mapped before any large
import, because nothing else may lie at those addresses. The process ends with its engine.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import signal
import socket
import sys

COLLISION = 75  # exit status: the addresses are taken; another process may find them free
UNMAPPABLE = 76  # exit status: the system does not let this memory be mapped
PR_SET_PDEATHSIG = 1
MAP_FIXED_NOREPLACE = 0x100000


def main() -> None:
    # The engine may drain before it ends, so a signal to the whole terminal or service must not end this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    end = socket.socket(fileno=int(sys.argv[1]))
    _map(json.loads(_exactly(end, int.from_bytes(_exactly(end, 4), "little"))))

    # Imported only now, because these imports bring libraries and threads, which may lie at any address.
    import asyncio

    from asynckv.edges.survivor.child import Child

    asyncio.run(Child(end).run())


def _exactly(end: socket.socket, size: int) -> bytes:
    data = end.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        sys.exit(0)  # the engine's process has ended
    return data


def _map(shares: list[tuple[int, int, int, int]]) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    for fd, offset, address, length in shares:
        flags = mmap.MAP_SHARED | MAP_FIXED_NOREPLACE
        found = libc.mmap(address, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
        if found != address:
            error = ctypes.get_errno()
            if error == errno.EEXIST or found != ctypes.c_void_p(-1).value:  # an old kernel maps elsewhere
                os._exit(COLLISION)
            print(f"{length} bytes of memory cannot be mapped: {os.strerror(error)}", file=sys.stderr)
            os._exit(UNMAPPABLE)
        # This process is expected to crash, and a core dump of the pool would delay its end by minutes.
        libc.madvise(address, length, mmap.MADV_DONTDUMP)
    for fd in {share[0] for share in shares}:
        os.close(fd)


if __name__ == "__main__":
    main()
