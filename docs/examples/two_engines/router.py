"""The router, and three clients: `python router.py PREFILL_URL DECODE_URL`. A router does not need asynckv."""

from __future__ import annotations

import sys
import time

from scenery import NUM_BLOCKS, ask


def main(prefill: str, decode: str) -> None:
    """Send three requests, of which the first one succeeds."""
    prompt = list(range(40))

    # 1. A request that succeeds. The router passes `params` from one engine to the other unchanged.
    params = ask(f"{prefill}/prefill", request_id="r1", prompt=prompt)["params"]
    answer = ask(f"{decode}/decode", request_id="r1", prompt=prompt, params=params)
    print(f"r1: {answer['num_bytes']:,} bytes of KV came from {answer['from']}; they are right: {answer['is_right']}")

    # 2. The client disconnects before the decode engine knows of the request.
    ask(f"{prefill}/prefill", request_id="r2", prompt=prompt)
    ask(f"{prefill}/abort", request_id="r2")
    print(f"r2: aborted; the prefill engine has its blocks back after {wait_until_free(prefill):.2f} s")

    # 3. The prefill engine withdraws a request, but the decode engine gets its params nevertheless.
    params = ask(f"{prefill}/prefill", request_id="r3", prompt=prompt)["params"]
    ask(f"{prefill}/abort", request_id="r3")
    wait_until_free(prefill)
    answer = ask(f"{decode}/decode", request_id="r3", prompt=prompt, params=params)
    print(f"r3: the pull failed ({answer['why']}); computed {answer['from']}; it is right: {answer['is_right']}")

    for engine in (prefill, decode):
        wait_until_free(engine)
    print("all blocks are free in both engines")


def wait_until_free(engine: str, timeout_s: float = 10.0) -> float:
    """Wait until all blocks of an engine are free, and return the seconds that it took."""
    start = time.monotonic()
    while ask(f"{engine}/status")["free_blocks"] < NUM_BLOCKS:
        if time.monotonic() > start + timeout_s:
            raise TimeoutError(f"{engine} does not have all its blocks after {timeout_s:g} s")
        time.sleep(0.01)
    return time.monotonic() - start


if __name__ == "__main__":
    main(*sys.argv[1:])
