"""Test your integration with simulated planes and a manual clock: here a read hangs, and its blocks are held."""

import asyncio

import kv

from asynckv import Engine, EngineConfig, EngineDesk, Finished, Lend, PrefillRanks, Pull, PullTimeout
from asynckv.testing import ManualClock, SimControl, SimData, SimNetwork


async def main() -> None:
    clock, network = ManualClock(), SimNetwork()
    planes = SimData(network, "prefill"), SimData(network, "decode")
    prefill, decode = (
        Engine(EngineConfig(engine_id=data.name), kv.memory(1)[1], data=data, control=SimControl(network), clock=clock)
        for data in planes
    )
    async with prefill, decode:
        lender, reader = EngineDesk(prefill), EngineDesk(decode)  # an EngineThread has one inside
        params = PrefillRanks("prefill", [prefill.endpoint]).make_params("r1", [(0, [3, 4, 9])], 40, written=True)
        planes[1].deferred = True  # reads begin, but end only when the test says so
        lender.submit([Lend(params)])
        reader.submit([Pull(request_id="r1", groups=[(0, [7, 5, 6])], params=params, timeout_s=5.0)])

        (failed,) = (await told(reader, clock)).failed
        assert isinstance(failed.error, PullTimeout)
        assert failed.is_held  # your scheduler must not reuse blocks 7, 5 and 6 yet
        planes[1].finish()  # at any time, because nothing here waits for real time
        assert (await told(reader, clock)).returned == ["r1"]  # now it may reuse them
        assert [end.request_id for end in (await told(lender, clock)).finished_sending] == ["r1"]
    print("held after PullTimeout, and returned")


async def told(desk: EngineDesk, clock: ManualClock) -> Finished:
    while not (finished := desk.take_finished()):
        clock.advance(0.1)
        await asyncio.sleep(0)
    return finished


if __name__ == "__main__":
    asyncio.run(main())
