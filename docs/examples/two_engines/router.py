"""The router, and three clients: `python router.py PREFILL_URL DECODE_URL`. A router needs nothing of asynckv."""

from __future__ import annotations

import sys
import time

from scenery import NUM_BLOCKS, ask


def main(prefill: str, decode: str) -> None:
    """Send three requests, one of which goes well."""
    prompt = list(range(40))

    # 1. It goes well. What travels between the engines is `params`: the router passes them on as they are.
    params = ask(f"{prefill}/prefill", request_id="r1", prompt=prompt)["params"]
    answer = ask(f"{decode}/decode", request_id="r1", prompt=prompt, params=params)
    print(f"r1: {answer['num_bytes']:,} bytes of KV came from {answer['from']}; they are right: {answer['is_right']}")

    # 2. The client leaves before the decode engine has heard of the request.
    ask(f"{prefill}/prefill", request_id="r2", prompt=prompt)
    ask(f"{prefill}/abort", request_id="r2")
    print(f"r2: aborted; the prefill engine has its blocks back after {wait_until_free(prefill):.2f} s")

    # 3. The prefill engine takes a request back, and the decode engine comes with its params all the same.
    params = ask(f"{prefill}/prefill", request_id="r3", prompt=prompt)["params"]
    ask(f"{prefill}/abort", request_id="r3")
    wait_until_free(prefill)
    answer = ask(f"{decode}/decode", request_id="r3", prompt=prompt, params=params)
    print(f"r3: the pull failed ({answer['why']}); computed {answer['from']}; it is right: {answer['is_right']}")

    for engine in (prefill, decode):
        wait_until_free(engine)
    print("all blocks are free in both engines")


def wait_until_free(engine: str, timeout_s: float = 10.0) -> float:
    """Wait until an engine has all its blocks; returns the seconds that it took."""
    start = time.monotonic()
    while ask(f"{engine}/status")["free_blocks"] < NUM_BLOCKS:
        if time.monotonic() > start + timeout_s:
            raise TimeoutError(f"{engine} does not have all its blocks after {timeout_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
