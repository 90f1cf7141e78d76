"""Break real workers on purpose and watch what is published: `python -m tests.lab.chaos --help`.

Real processes, NIXL over UCX on CPU memory, ZMQ on 127.0.0.1 (`tests.lab.arena`). Scenarios kill, restart, freeze and
garble prefill workers, or the wire to them, while a decode worker pulls.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from asynckv.core import wire as m
from asynckv.core.types import Cohort, decode_params
from asynckv.tools.bench.processes import Failure
from scripts import command
from tests.lab.arena import MOST_BLOCKS, PATIENCE_S, TIMEOUT_S, Arena, Worker, layout_of, perform
from tests.lab.fleet import Lost
from tests.lab.strangers import (
    GREETING,
    HANDSHAKE,
    HUGE,
    Proxy,
    Stranger,
    connected,
    every_message,
    is_malformed,
    mutate,
    packets,
    place,
    shout,
)

SETTLED, GROWTH = 10, {"fds": 2, "threads": 0, "rss_mib": 8, "tasks": 8}
GROWTH |= {"children": 0, "children_fds": 2, "children_threads": 0, "children_rss_mib": 8}
"""After how many cycles a survivor has all it needs, and how much more it may have at the end, under load."""


def real_packets(params: Mapping[str, Any]) -> list[bytes]:
    """Packets about one lent request that its rank would take from a reader."""
    known = decode_params(params)
    said = every_message(known, layout_of(), Cohort("stranger"))
    of_readers = [x for x in said if isinstance(x, m.Hello | m.Claim | m.Renew | m.Release | m.StatusRequest)]
    return packets("stranger", known.endpoints[0].incarnation, of_readers)


async def kill(arena: Arena) -> None:
    """Kill -9 a prefill worker in the middle of pulls, three times, beside a healthy one."""
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    outages: list[float] = []
    async with healthy.load(3), victim.load(6):
        for _ in range(3):
            await victim.more(20, arena.seconds / 3)
            stock = [await victim.lend(reads=True) for _ in range(6)]
            during = [asyncio.create_task(victim.pull(lent)) for lent in stock[:3]]
            await asyncio.sleep(arena.rng.uniform(0, 0.02))  # a random moment
            began = time.monotonic()
            await victim.kill()
            for lent in stock[3:]:
                arena.check(await victim.pull(lent) != "complete", "a request of a dead process completed")
            await asyncio.gather(*during, healthy.more(5))
            await victim.start()
            await victim.more(5)
            outages.append(round(time.monotonic() - began, 2))
            arena.note(f"kill {len(outages)}: {victim.record()}; healthy: {healthy.counts['complete']}")
    arena.found["outages_s"] = outages
    await arena.finish(healthy)
    arena.check(bool(victim.failed), "no pull was hit by a kill")


async def away(arena: Arena) -> None:
    """Kill -9 a decode worker, and end strangers rudely, while the prefill worker's loop is away with full queues."""
    prefill, unanswered = await arena.start("prefill"), 0
    rude = HANDSHAKE, (b"\0\1x" * 100 + b"\4\7\4PING\0\0") * 100
    for _ in range(2):
        stock = [await prefill.lend(reads=True) for _ in range(24)]
        await prefill.pull(await prefill.lend())
        held = asyncio.create_task(prefill.ask("hold", seconds=arena.seconds))
        pulls = [asyncio.create_task(prefill.pull(lent)) for lent in stock]
        for _ in range(3):
            async with connected(*place(prefill.address)) as (reader, writer):
                writer.write(rude[0])
                await reader.read(1)
                writer.write(rude[1])
                await writer.drain()
        await asyncio.sleep(arena.seconds / 2)
        await arena.decode.kill()
        unanswered += sum(isinstance(x, Lost) for x in await asyncio.gather(*pulls, return_exceptions=True))
        await held
        await arena.decode.start()
        arena.check(await prefill.pull(await prefill.lend()) == "complete", "the next decode worker was not served")
    await arena.finish()
    arena.found["without_outcome"] = unanswered
    arena.check(not prefill.aborts, f"the prefill worker died {prefill.aborts} times")


async def restart(arena: Arena) -> None:
    """Restart a prefill worker on its port, six times or more, under load; nothing in the decode worker may grow."""
    victim = await arena.start("victim")
    address, refusals, seen = victim.address, Counter[str](), list[dict[str, int]]()
    for number in range(1 + max(6, int(2.5 * arena.seconds))):
        async with victim.load(6):
            await victim.more(5, arena.seconds / 20)
            if number:
                old = await victim.lend(reads=True)
                await victim.kill()
                await victim.start(address)
                arena.check(victim.address == address, f"restarted at {victim.address}, not {address}")
                refusals[await victim.pull(old)] += 1
                await victim.more(10)
        seen.append((await arena.decode.state())["usage"])
        arena.note(f"start {number}: {seen[-1]} {victim.counts['complete']} complete")
    arena.found |= {"restarts": len(seen) - 1, "old_params": dict(refusals)} | {
        k: [x[k] for x in seen] for k in seen[0]
    }
    arena.check(set(refusals) <= {"restarted", "peer_lost", "peer_unreachable"}, f"old params: {refusals}")
    for what in ("nixl_peers", "zmq_links", "fds", "tasks"):
        # The second process of the data plane is started after a while; each takes a socket and a process descriptor.
        third, last = (x[what] - (2 * x["children"] if what == "fds" else 0) for x in (seen[3], seen[-1]))
        arena.check(last <= third, f"{what} grew from {third} after 3 restarts to {last} after {len(seen) - 1}")
    await arena.finish()


async def freeze(arena: Arena) -> None:
    """Stop a prefill worker for 3 s in the middle of pulls, beside a healthy one."""
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    async with healthy.load(3), victim.load(6):
        await victim.more(20, arena.seconds / 2)
        stock = [await victim.lend(reads=True, lease_s=10.0) for _ in range(12)]
        before = healthy.counts["complete"]
        victim.signal(signal.SIGSTOP)
        # Some deadlines pass during the stop, some after it.
        during = [asyncio.create_task(victim.pull(lent, arena.rng.uniform(0.3, 5.0))) for lent in stock]
        await asyncio.sleep(3.0)
        meanwhile = healthy.counts["complete"] - before
        victim.signal(signal.SIGCONT)
        reasons = Counter(await asyncio.gather(*during))
        await victim.more(20, arena.seconds / 2)
    arena.found |= {"healthy_meanwhile": meanwhile, "stopped_pulls": dict(reasons)}
    arena.check(meanwhile > 20, f"the healthy worker served {meanwhile} pulls in 3 s")
    arena.check(reasons["timeout"] > 0, "no pull noticed the stop")
    await arena.finish(healthy)


async def expire(arena: Arena) -> None:
    """Let leases expire under running reads; what was lent is overwritten as soon as its lease is over."""
    lease_s, variants = 2.0, dict[str, Counter[str]]()
    victim = await arena.start("victim", lease_s=lease_s, grant_s=0.5)
    async with Proxy(victim.address, arena.rng) as between:
        victim.reached_by = between.address
        for variant in ("reader_stopped", "owner_stopped", "claims_late", "read_late") * max(1, int(arena.seconds / 4)):
            await victim.pull(await victim.lend())
            before = (await arena.decode.state())["counters"].get("withheld_bytes", 0)
            stock = [await victim.lend(MOST_BLOCKS, lease_s, True) for _ in range(12)]
            if variant.endswith("late"):
                between.flow.clear()
            overwritten = asyncio.create_task(victim.state())
            if variant == "read_late":
                await overwritten
            pulls = [asyncio.create_task(victim.pull(lent, 8.0)) for lent in stock]
            await asyncio.sleep(arena.rng.uniform(0, 0.01))  # a random moment
            if variant == "owner_stopped":
                victim.signal(signal.SIGSTOP)
                await asyncio.sleep(lease_s + 0.3)
                victim.signal(signal.SIGCONT)
            elif variant == "reader_stopped":
                arena.decode.signal(signal.SIGSTOP)
                await overwritten
                arena.decode.signal(signal.SIGCONT)
            await overwritten
            between.flow.set()
            found = variants.setdefault(variant, Counter())
            found.update(await asyncio.gather(*pulls))
            found["withheld_bytes"] += (await arena.decode.state())["counters"].get("withheld_bytes", 0) - before
            arena.note(f"{variant}: {dict(found)}")
        await arena.finish()
    arena.found["variants"] = {k: dict(v) for k, v in variants.items()}
    for variant in ("claims_late", "read_late"):
        arena.check(not variants[variant]["complete"], f"{variant}: pulls completed without a lease")
    tried = sum(variants[x]["withheld_bytes"] for x in ("reader_stopped", "owner_stopped"))
    arena.check(variants["read_late"]["withheld_bytes"] > 0, "nothing read what was overwritten before")
    # Through shared memory a read may be over before anybody can be stopped.
    arena.check(tried > 0 or arena.transport == "auto", "no read was overtaken by its lease's end")


async def cancel(arena: Arena) -> None:
    """Cancel nine of ten requests at random moments: tasks, calls of `cancel`, and announced requests."""
    prefill = await arena.start("prefill", lease_s=60.0)
    total = max(500, int(100 * arena.seconds))
    todo, asked = iter(range(total)), Counter[str]()

    async def client() -> None:
        for _ in todo:
            how = arena.rng.choice(("task", "engine", "announce")) if arena.rng.random() < 0.9 else ""
            asked[how or "left_alone"] += 1
            reason = await prefill.pull(await prefill.lend(), PATIENCE_S, how, arena.rng.expovariate(1 / 0.015))
            arena.check(reason == "complete" or bool(how), f"not cancelled, but {reason}")

    async with asyncio.TaskGroup() as group:
        for _ in range(24):
            group.create_task(client())
    await arena.finish()  # long before the leases would expire
    counters = (await prefill.state())["counters"]
    leases = {k: v for k, v in counters.items() if k.startswith("lease.")}
    arena.found |= {"requests": total, "asked": dict(asked), "leases": leases}
    arena.check(leases == {"lease.released": total}, f"leases ended {leases}, all should be released")
    arena.check(set(prefill.failed) <= {"cancelled", "task_cancelled"}, f"cancelled pulls ended {prefill.failed}")
    arena.check(prefill.failed.total() > total / 10, f"only {prefill.failed.total()} were cancelled in time")


async def garbage(arena: Arena) -> None:
    """Send random bytes, mutated packets and frames of 100 MB to a prefill worker's port while it serves."""
    prefill, rng, sent = await arena.start("prefill"), arena.rng, Counter[str]()
    real = real_packets((await prefill.lend())["params"])
    stranger = Stranger(prefill.address)

    async def shout_any(recorded: bytes) -> None:
        sent["raw_streams"] += 1
        payload = mutate(rng, rng.choice(real))[:255]
        said = (
            rng.randbytes(rng.randint(1, 4096)),
            mutate(rng, recorded),
            GREETING[: rng.randrange(64)],
            HANDSHAKE + b"\x02" + rng.randbytes(1000),
            HANDSHAKE + bytes([rng.choice((0, 1, 4, 6)), len(payload)]) + payload,
        )
        await shout(prefill.address, [rng.choice(said)])

    try:
        async with Proxy(prefill.address, rng) as between:  # only to record what a reader says
            prefill.reached_by = between.address
            async with prefill.load(4):
                await prefill.more(10)
                rss, until = (
                    (await prefill.ask("state", wait_s=0))["usage"]["rss_mib"],
                    time.monotonic() + arena.seconds,
                )
                while time.monotonic() < until:
                    batch = [[rng.randbytes(rng.randint(0, 300))] for _ in range(30)]
                    batch += [[mutate(rng, rng.choice(real))] for _ in range(150)]
                    sent["malformed"] += sum(is_malformed(x) for (x,) in batch)
                    batch += [[rng.randbytes(8) for _ in range(rng.randint(2, 5))] for _ in range(10)]
                    sent.update(packets=len(batch), frames=10)
                    rng.shuffle(batch)
                    # Each has a connection of its own: one that sends so much rubbish is soon not listened to.
                    with contextlib.closing(Stranger(prefill.address)) as each:
                        arena.check(await asyncio.to_thread(each.send, batch), "a stranger's ping was not answered")
                    recorded = bytes(between.asked[: rng.randint(1, len(between.asked))])
                    await asyncio.gather(*(shout_any(recorded) for _ in range(8)))
                head = HANDSHAKE + b"\x02" + HUGE.to_bytes(8, "big")
                took = await shout(prefill.address, [head, *[bytes(HUGE // 100)] * 100])
                was_cut = await asyncio.to_thread(stranger.send_huge)
                await prefill.more(10)
            await arena.finish(prefill)
    finally:
        stranger.close()
    state = await prefill.state()
    names = {"malformed": "dropped.malformed", "frames": "control.dropped_frames"}
    counted, grown = {k: state["counters"].get(v, 0) for k, v in names.items()}, state["usage"]["rss_mib"] - rss
    arena.found |= {"sent": dict(sent), "counted": counted, "huge_bytes_taken": took, "rss_grown_mib": grown}
    for what, found in counted.items():
        arena.check(found >= sent[what], f"{what}: {sent[what]} were sent, {found} counted")
    arena.check(was_cut, "a frame of 100 MB from a DEALER did not end its connection")
    arena.check(took < HUGE, "a frame of 100 MB was taken from a raw connection")
    arena.check(grown < 100, f"the prefill worker grew by {grown} MiB")


async def proxy(arena: Arena) -> None:
    """Put a proxy that misbehaves between the control planes of one prefill worker and the decode worker."""
    healthy, victim = await arena.start("healthy"), await arena.start("victim")
    async with Proxy(victim.address, arena.rng) as between:
        victim.reached_by = between.address
        async with healthy.load(2), victim.load(6):
            await victim.more(10)
            between.is_bad, before = True, victim.counts["complete"]
            await asyncio.sleep(arena.seconds)
            while_bad = {"complete": victim.counts["complete"] - before, "failed": dict(victim.failed)}
            between.is_bad, began = False, time.monotonic()
            await victim.more(50)
            arena.found |= {"while_bad": while_bad, "recovered_s": round(time.monotonic() - began, 2)}
        await arena.finish(healthy)
    arena.found["proxy"] = dict(between.did)
    arena.check(any(between.did[x] for x in ("cut", "truncated", "swallowed")), "the proxy did no harm")


def restarts(counters: Mapping[str, int]) -> int:
    """Return the number of times that a data plane in a process of its own was restarted."""
    return sum(count for name, count in counters.items() if name.startswith("data.") and name.endswith("restarts"))


SURVIVED = ("kill", "away_kill", "stop_kill", "restart", "stop")
"""Faults of the survivor's other side: each happens once, in some order, and then again in another order."""


async def survive(arena: Arena) -> None:
    """Kill, stop and restart one of two workers that lend to each other and pull; the other must go on, as it was."""
    left, right = arena.decode, await arena.start("prefill")
    left.reader, right.reader = right, left
    series: dict[str, list[dict[str, int]]] = {left.name: [], right.name: []}
    lost, faults, recovered = Counter[str](), Counter[str](), list[float]()
    planes_lost, unanswered, is_over = Counter[str](), 0, False
    deck: list[str] = []

    async def client(owner: Worker, reader: Worker) -> None:
        nonlocal unanswered
        while not is_over:
            await owner.up.wait()
            await reader.up.wait()
            try:
                lent = await owner.lend(arena.rng.randint(MOST_BLOCKS // 2, MOST_BLOCKS), 4.0, True)
                await owner.pull(lent, arena.rng.uniform(0.3, TIMEOUT_S))
            except Lost:  # with one of them: no process is left to ask, or to tell
                unanswered += 1

    async def hurt(victim: Worker, survivor: Worker, fault: str) -> None:
        rng = arena.rng
        if fault == "away_kill":
            # The survivor's loop is busy meanwhile, and finds what a dead process has asked for.
            survivor.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            await victim.kill()
            survivor.signal(signal.SIGCONT)
        if fault in ("stop", "stop_kill"):
            victim.signal(signal.SIGSTOP)
            await asyncio.sleep(rng.uniform(0.05, 1.5))
        if fault == "stop":
            victim.signal(signal.SIGCONT)
            return
        await (victim.end() if fault == "restart" else victim.kill())
        await asyncio.sleep(rng.uniform(0, 0.3))
        await victim.start(victim.address)

    async def cycle(number: int, victim: Worker, survivor: Worker) -> None:
        if not deck:
            deck.extend(arena.rng.sample(SURVIVED, len(SURVIVED)))
        fault = deck.pop()
        faults[fault] += 1
        aborts = survivor.aborts
        await asyncio.gather(left.more(3), right.more(3))
        await asyncio.sleep(arena.rng.uniform(0, 0.1))  # a random moment
        began = time.monotonic()
        await hurt(victim, survivor, fault)
        while True:
            # The survivor may be dead by now, or be about to die.
            for worker in (survivor, victim):
                await worker.revive()
            deaths = left.aborts + right.aborts
            causes = await asyncio.gather(left.more(3), right.more(3), return_exceptions=True)
            if not any(causes):
                break
            if left.aborts + right.aborts == deaths:
                raise Failure(f"cycle {number}, {fault} of {victim.name}: {', '.join(map(str, filter(None, causes)))}")
        recovered.append(round(time.monotonic() - began, 2))
        lost[fault] += survivor.aborts - aborts
        state = await survivor.ask("state", wait_s=0)
        series[survivor.name].append(state["usage"])
        planes_lost[survivor.name] = max(planes_lost[survivor.name], restarts(state["counters"]))
        arena.note(f"cycle {number}: {fault} of {victim.name}; survivors lost {lost.total()}, {state['usage']}")

    async with asyncio.TaskGroup() as group:
        for owner, reader in ((left, right), (right, left)) * 6:
            group.create_task(client(owner, reader))
        for number in range(arena.cycles):
            # Each survives half of them without a break, so that what grows is seen to.
            sides = (right, left) if number < arena.cycles / 2 else (left, right)
            await cycle(number, *sides)
        is_over = True
    await arena.finish()
    arena.found |= {
        "cycles": arena.cycles,
        "faults": dict(faults),
        "survivors_lost": lost.total(),
        "lost_by_fault": {k: v for k, v in lost.items() if v},
        "planes_lost": planes_lost.total(),
        "without_outcome": unanswered,
        "recovered_s": {"median": sorted(recovered)[len(recovered) // 2], "most": max(recovered)},
        "pulls_from_decode": left.record(),
        "usage": {name: {k: [x[k] for x in seen] for k in seen[0]} for name, seen in series.items() if seen},
    }
    arena.check(not lost.total(), f"{lost.total()} survivors of {arena.cycles} died: {dict(+lost)}")
    for name, seen in series.items():
        for what, most in GROWTH.items():
            if len(seen) >= 2 * SETTLED:
                early, late = (
                    sorted(x[what] for x in part)[len(part) // 2]
                    for part in (seen[SETTLED:][:SETTLED], seen[-SETTLED:])
                )
                arena.check(late <= early + most, f"{name}: {what} grew from {early} after {SETTLED} cycles to {late}")


SCENARIOS = {work.__name__: work for work in (kill, away, restart, freeze, expire, cancel, garbage, proxy, survive)}


async def run(
    name: str, *, seconds: float = 4.0, seed: int = 0, transport: str = "tcp", cycles: int = 20, process: str = "auto"
) -> dict[str, Any]:
    """Run one scenario; returns its record. Bounded in time, and no process is left."""

    async def work(arena: Arena) -> None:
        arena.seconds, arena.cycles, arena.setup = seconds, cycles, {"process": process}
        await arena.decode.start()
        arena.found["decode_before"] = (await arena.decode.state())["usage"]
        await SCENARIOS[name](arena)

    return await perform(name, work, seed=seed, transport=transport, within_s=60 + 10 * max(seconds, cycles))


def chaos(
    scenarios: command.Scenarios = None,
    seconds: Annotated[float, typer.Option(help="About how long each keeps its load up.")] = 4.0,
    seed: Annotated[int, typer.Option(help="Of sizes, moments and garbage.")] = 0,
    json: command.Json = "-",
    transport: Annotated[
        Literal["tcp", "cma", "auto"],
        typer.Option(help="Of UCX; cma and auto are shared memory, where a stopped process can still be read."),
    ] = "tcp",
    cycles: Annotated[int, typer.Option(help="How many faults survive has.")] = 20,
    process: Annotated[
        Literal["auto", "serving", "never"],
        typer.Option(help="What of NIXL runs in a process of its own, as NixlConfig(process=...) says."),
    ] = "auto",
) -> int:
    """Break real asynckv workers on purpose, and compare every byte that is published."""
    names = command.chosen(scenarios, SCENARIOS)
    command.check(0 < seconds <= 3600, f"--seconds {seconds:g} is outside (0, 3600]")
    command.check(1 <= cycles <= 10_000, f"--cycles {cycles} is outside [1, 10000]")
    runs = (run(n, seconds=seconds, seed=seed, transport=transport, cycles=cycles, process=process) for n in names)
    return command.report(json, (functools.partial(asyncio.run, each) for each in runs))


EPILOG = f"""
[bold]Scenarios[/bold]

{command.listed(command.first_lines(SCENARIOS))}

[bold]Examples[/bold]

  python -m tests.lab.chaos

  python -m tests.lab.chaos survive --cycles 100 --transport cma | jq .problems

[bold]Exit status[/bold]  0 all good, 1 a scenario failed, 2 bad input, 130 Ctrl-C
"""
main = command.script(chaos, EPILOG)


if __name__ == "__main__":
    sys.exit(main())
